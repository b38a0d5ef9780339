"""`tightfit plan`: will it fit, how, and how fast."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tightfit.cli.options import AsJson, count_option, refuse_given, takes_options
from tightfit.counted import counted

if TYPE_CHECKING:
    from tightfit.hardware.machine import Machine
    from tightfit.jobs.job import Job
    from tightfit.models.quantized.held_weights import HeldWeights
    from tightfit.models.spec import ModelSpec
    from tightfit.plan.answer import Question
    from tightfit.plan.plan import Plan

JOB_FILES = (".yaml", ".yml")
DOES_NOT_FIT = 4
"""Exit code where the model does not fit the machine."""
OF_SERVING = ("quantize", "context", "cache_format", "batch")
OF_TRAINING = (
    *("seq", "global_batch", "batch_tokens", "precision", "engine", "steps", "tokens", "pin", "adapter", "bits"),
    *("allow_lossy", "confirm", "compare_estimators", "save", "export"),
)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The arguments and options of `tightfit plan`."""

    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A preset, a directory with a config.json, or a job file (YAML).")
    ]
    on: Annotated[str, typer.Option(help="The machine: 8xV100-32GB, 2x8xH100-80GB, 4xA100-40GB:pcie.")] = "local"
    host_memory: Annotated[str | None, typer.Option(help="Memory of one node's host: 512GB.")] = None
    seq: Annotated[int | None, count_option(text="Tokens per row; 4k is 4,000.", least=2)] = None
    global_batch: Annotated[int | None, count_option(text="Rows per optimizer step, over all GPUs.")] = None
    batch_tokens: Annotated[int | None, count_option(text="The same in tokens: 4M.")] = None
    precision: Annotated[
        Literal["fp32", "bf16", "fp16", "pure-bf16"] | None, typer.Option(help="By default what suits the card.")
    ] = None
    engine: Annotated[
        str,
        typer.Option(help="Whose training code the numbers are for: tightfit, hf, deepspeed, torchtitan, megatron."),
    ] = "tightfit"
    steps: Annotated[int | None, count_option(text="Steps of the job, to tell how long it takes.")] = None
    tokens: Annotated[int | None, count_option(text="The same in tokens: 15T.")] = None
    pin: Annotated[
        list[str] | None,
        typer.Option("-o", "--pin", help="Decide a field: -o layout.zero=3 -o levers.offload=none. May be repeated."),
    ] = None
    adapter: Annotated[
        int | None, typer.Option(help="Train adapters of this rank (LoRA) on the model, which stays frozen.")
    ] = None
    bits: Annotated[
        int | None, typer.Option(help="With --adapter: bits that the frozen model is held in, 2, 4 or 8 (QLoRA).")
    ] = None
    allow_lossy: Annotated[bool, typer.Option("--allow-lossy", help="Let the planner narrow optimizer states.")] = False
    confirm: Annotated[
        bool,
        typer.Option("--confirm", help="Simulate the plan: the real step on fake tensors."),
    ] = False
    compare_estimators: Annotated[
        bool, typer.Option("--compare-estimators", help="Show DeepSpeed's and accelerate's estimates.")
    ] = False
    save: Annotated[
        Path | None, typer.Option(help="Write the plan as JSON, which `tightfit train` or `launch` runs.")
    ] = None
    export: Annotated[
        list[str] | None,
        typer.Option(
            help="A folder for all exports, or KIND=FILE, where KIND is deepspeed, accelerate, torchrun, slurm, "
            "kubernetes, pytorchjob or skypilot."
        ),
    ] = None
    serve: Annotated[bool, typer.Option("--serve", help="Ask about serving on one card instead of training.")] = False
    quantize: Annotated[str | None, typer.Option(help="Format of served weights: bf16, q8_0, q4_0, int4, fp8, …")] = (
        None
    )
    context: Annotated[int | None, count_option(text="Tokens of a served request, prompt and answer.")] = None
    cache_format: Annotated[
        Literal["model", "int8", "fp8"] | None, typer.Option(help="What served keys and values are kept in.")
    ] = None
    batch: Annotated[int | None, count_option(text="Requests served at a time.")] = None
    as_json: AsJson = False


@takes_options
def plan(options: PlanOptions) -> None:
    """Find the layout and levers with which a model trains fastest on the GPUs you have, before running anything.

    Tells whether it fits, where memory and time go, and what else would do; or what would have to change. The exit code
    is 0 where it fits, 4 where it does not, and 2 where the question cannot be answered.

    \b
    tightfit plan llama-3.1-8b --on 8xV100-32GB --seq 512 --global-batch 64
    tightfit plan llama-3.1-405b --on 128x8xH100-80GB --seq 8192 --batch-tokens 16M --tokens 15T
    tightfit plan llama-3.1-8b --on H100-80GB -o levers.offload=none
    tightfit plan llama-3.1-8b --on RTX3090-24GB --adapter 16 --bits 4
    tightfit plan llama-3.1-8b --on T4 --serve --quantize q8_0 --context 4096
    tightfit plan compressed-model --on T4 --serve
    """
    from tightfit.hardware.machine import parse_machine

    machine = parse_machine(options.on, options.host_memory)
    if options.serve:
        refuse_given(options, OF_TRAINING, "which is about training; leave it or --serve out")
        return _serve(options, machine)
    refuse_given(options, OF_SERVING, "which is about serving; add --serve or leave it out")
    from tightfit.plan.answer import answer
    from tightfit.report.plan import print_answer
    from tightfit.report.waiting import waiting

    question = _with_adapters(_question(options, machine), options.adapter, options.bits)
    _check_outputs(options)
    with waiting(f"looking through the layouts of {counted(machine.ranks, 'GPU')}"):
        found = answer(question)
    with waiting("rehearsing the step on fake tensors"):
        extra = _more(found.plan, options)
    sentences = _write_outputs(found.plan, options)
    if (expanded := _expanded_weights(found.plan)) is not None:
        extra["expanded"] = expanded
        sentences.append(f"{found.plan.model} is compressed ({expanded}); training expands it and counts all of it")
    print_answer(found, as_json=options.as_json, extra=extra, lines=sentences)
    if not found.plan.fits:
        raise typer.Exit(DOES_NOT_FIT)


def _with_adapters(question: "Question", rank: int | None, bits: int | None) -> "Question":
    """The question with adapters on its model, where options ask for some; they change those of a job file."""
    from tightfit.errors import UserError

    given = {name: value for name, value in (("rank", rank), ("bits", bits)) if value is not None}
    if not given:
        return question
    fields = {**question.job.get("adapter", {}), **given}
    if "rank" not in fields:
        raise UserError(f"--bits is {bits}, which is of a model under adapters; add --adapter RANK or leave it out")
    return question.with_adapters(fields)


def _check_outputs(options: PlanOptions) -> None:
    """Refuse what could not be written, before a plan is looked for."""
    if options.save is not None:
        from tightfit.plan.plan import refuse_overwriting

        refuse_overwriting(options.save)
    if options.export:
        from tightfit.exports.files import check_export

        for wanted in options.export:
            check_export(wanted)


def _write_outputs(plan: "Plan", options: PlanOptions) -> list[str]:
    """Write the plan and its exports where they are asked for; a line about each file."""
    lines = []
    if options.export:
        from tightfit.exports.files import export

        lines += [line for wanted in options.export for line in export(plan, wanted)]
    if options.save is not None:
        from tightfit.plan.job import run_command

        plan.save(options.save)
        lines.append(f"wrote {options.save}; run it with `{run_command(plan, options.save)}`")
    return lines


def _shape(job: "Job") -> dict[str, int]:
    """What a job changes of its model: the sizes it gives, and the vocabulary that will be trained."""
    from tightfit.jobs.job import rounded_vocabulary

    trained = {"vocab_size": rounded_vocabulary(job.tokenizer.vocab_size)} if job.tokenizer.source == "train" else {}
    return dict(job.model.shape) | trained


def _question(options: PlanOptions, machine: "Machine") -> "Question":
    """The question behind the options; a job file's fields count where an option does not say otherwise."""
    from tightfit.jobs.engine import find_engine
    from tightfit.jobs.workload import with_teacher
    from tightfit.models.resolve import reshaped
    from tightfit.plan.answer import Question, make_workload, steps_of
    from tightfit.plan.search.pins import parse_pins

    job = _job_file(options.model)
    if job is not None:
        options = _with_job(options, job)
    spec, _ = known_model(options.model)
    if job is not None:
        spec = job.experts.applied(reshaped(spec, _shape(job), options.model))
    job_fields = _model_field(options.model) if job is None else _other_fields(job)
    workload = make_workload(
        spec,
        machine,
        sequence_length=options.seq,
        rows=options.global_batch,
        tokens=options.batch_tokens,
        precision=options.precision,
        engine=find_engine(options.engine).name,
    )
    if job is not None:
        workload = with_teacher(workload, job)
    return Question(
        model=options.model,
        workload=workload,
        machine=machine,
        pins=parse_pins(options.pin or []),
        lossy=options.allow_lossy,
        positions=spec.max_positions,
        steps=steps_of(workload, options.steps, options.tokens),
        job=job_fields,
    )


def _job_file(model: str) -> "Job | None":
    """The job, where `model` is the file of one."""
    if not model.endswith(JOB_FILES):
        return None
    from tightfit.jobs.load import load_job
    from tightfit.jobs.paths import with_absolute_paths

    return with_absolute_paths(load_job(Path(model)), Path(model).parent)


def _with_job(options: PlanOptions, job: "Job") -> PlanOptions:
    """The options with a job's fields where they leave something open."""
    has_batch = options.global_batch is not None or options.batch_tokens is not None
    has_length = options.steps is not None or options.tokens is not None
    return replace(
        options,
        model=job.model.source,
        seq=job.data.sequence_length if options.seq is None else options.seq,
        precision=options.precision or (None if job.precision == "auto" else job.precision),
        global_batch=options.global_batch if has_batch else job.global_batch,
        steps=options.steps if has_length else job.steps,
        pin=[*_decided("layout", job.layout), *_decided("levers", job.levers), *(options.pin or [])],
    )


def _other_fields(job: "Job") -> dict[str, Any]:
    """What a job file says beside layout and levers, which are planned."""
    return job.model_dump(mode="json", exclude={"layout", "levers"}, exclude_unset=True)


def _model_field(model: str) -> dict[str, Any]:
    """What a job has to say of a model that is not a preset."""
    from tightfit.models.presets import PRESETS

    if model in PRESETS:
        return {}
    from tightfit.jobs.paths import absolute  # with the schema of a whole job, which a preset needs not

    return {"model": {"source": str(absolute(Path(model).expanduser()))}}


def _decided(section: str, fields: Any) -> list[str]:
    """What a job file says of its layout or levers, as pins."""
    decided = {name: getattr(fields, name) for name in fields.model_fields_set}
    return [f"{section}.{name}={'null' if value is None else value}" for name, value in decided.items()]


def _more(plan: "Plan", options: PlanOptions) -> dict[str, Any]:
    """Further parts of the answer that options ask for: a simulation, other programs' estimates."""
    extra: dict[str, Any] = {}
    if options.confirm:
        from tightfit.prove.rehearsal import rehearse

        extra["simulation"] = plan.confirmed(rehearse(plan.workload, plan.layout, plan.levers))
    if options.compare_estimators:
        from tightfit.report.estimators import estimates

        extra["estimators"] = [estimate.to_json() for estimate in estimates(plan)]
    return extra


def _expanded_weights(plan: "Plan") -> str | None:
    """The format of a compressed model's weights, which training expands; None for others, and under adapters, where
    they stay compressed."""
    if plan.workload.adapted is not None:
        return None
    compressed = _compressed_weights(plan.model, plan.workload.spec)
    return None if compressed is None else compressed.description


def _compressed_weights(model: str, spec: "ModelSpec") -> "HeldWeights | None":
    """The compressed weights of the model in the directory or the run `model`; None for presets and plain models."""
    from tightfit.models.presets import PRESETS
    from tightfit.models.resolve import newest_checkpoint

    folder = Path(model).expanduser()
    if model in PRESETS or not folder.is_dir():
        return None
    folder = newest_checkpoint(folder, model)
    if not (folder / "config.json").is_file():
        return None
    from tightfit.jobs.served_weights import served_weights

    return served_weights(folder, spec)


def _serve(options: PlanOptions, machine: "Machine") -> None:
    from tightfit.errors import UserError
    from tightfit.plan.serving.plan import FORMATS, make_serving
    from tightfit.report.plan import print_serving

    if options.model.endswith(JOB_FILES):
        raise UserError(f"--serve asks about a model, and {options.model} is a job file; name its model or its run")
    spec, stored = known_model(options.model)
    compressed = _compressed_weights(options.model, spec) if options.quantize is None else None
    if options.quantize is None and stored not in FORMATS:
        from tightfit.models.loading import stored_weights

        stored, compressed = "bf16", stored_weights(options.model)
    serving = make_serving(
        options.model,
        spec,
        machine,
        form=options.quantize or stored,
        length=options.context,
        requests=1 if options.batch is None else options.batch,
        cache=options.cache_format or "model",
        compressed=compressed,
    )
    print_serving(serving, as_json=options.as_json)
    if not serving.fits:
        raise typer.Exit(DOES_NOT_FIT)


def known_model(model: str) -> "tuple[ModelSpec, str]":
    """The shape of a model from any source, and the format of its weights; reading a GGUF file needs torch."""
    from tightfit.models.hub import is_hub_name
    from tightfit.models.presets import PRESETS
    from tightfit.models.resolve import resolve_spec

    path = Path(model).expanduser()
    if model in PRESETS or is_hub_name(model) or path.suffix == ".json" or path.is_dir():
        return resolve_spec(model), "bf16"
    from tightfit.models.loading import source_format, source_spec

    return source_spec(model), source_format(model)
