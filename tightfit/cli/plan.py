"""`tightfit plan`: will it fit, how, and how fast."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

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


def plan(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A preset, a directory with a config.json, or a job file (YAML).")
    ],
    on: Annotated[str, typer.Option(help="The machine: 8xV100-32GB, 2x8xH100-80GB, 4xA100-40GB:pcie.")] = "local",
    host_memory: Annotated[str | None, typer.Option(help="Memory of one node's host: 512GB.")] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens per row.")] = None,
    global_batch: Annotated[int | None, typer.Option(help="Rows per optimizer step, over all GPUs.")] = None,
    batch_tokens: Annotated[str | None, typer.Option(help="The same in tokens: 4M.")] = None,
    precision: Annotated[
        Literal["fp32", "bf16", "fp16", "pure-bf16"] | None, typer.Option(help="By default what suits the card.")
    ] = None,
    engine: Annotated[
        str,
        typer.Option(help="Whose training code the numbers are for: tightfit, hf, deepspeed, torchtitan, megatron."),
    ] = "tightfit",
    steps: Annotated[int | None, typer.Option(help="Steps of the job, to tell how long it takes.")] = None,
    tokens: Annotated[str | None, typer.Option(help="The same in tokens: 15T.")] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option("-o", "--pin", help="Decide a field: -o layout.zero=3 -o levers.offload=none. May be repeated."),
    ] = None,
    adapter: Annotated[
        int | None, typer.Option(help="Train adapters of this rank (LoRA) on the model, which stays frozen.")
    ] = None,
    bits: Annotated[
        int | None, typer.Option(help="With --adapter: bits that the frozen model is held in, 2, 4 or 8 (QLoRA).")
    ] = None,
    allow_lossy: Annotated[
        bool, typer.Option("--allow-lossy", help="Let the planner narrow optimizer states.")
    ] = False,
    confirm: Annotated[
        bool, typer.Option("--confirm", help="Simulate the plan: the real step on fake tensors.")
    ] = False,
    compare_estimators: Annotated[
        bool, typer.Option("--compare-estimators", help="Show DeepSpeed's and accelerate's estimates.")
    ] = False,
    save: Annotated[Path | None, typer.Option(help="Write the plan as JSON; `tightfit train` runs it.")] = None,
    export: Annotated[
        list[str] | None,
        typer.Option(
            help="A folder for all exports, or KIND=FILE, where KIND is deepspeed, accelerate, torchrun, slurm, "
            "kubernetes, pytorchjob or skypilot."
        ),
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Ask about serving on one card instead of training.")] = False,
    quantize: Annotated[str | None, typer.Option(help="Format of served weights: bf16, q8_0, q4_0, …")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens of a served request, prompt and answer.")] = None,
    cache_format: Annotated[
        Literal["model", "int8", "fp8"] | None, typer.Option(help="What served keys and values are kept in.")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Requests served at a time.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
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
    from tightfit.errors import UserError
    from tightfit.hardware.machine import parse_machine

    machine = parse_machine(on, host_memory)
    if serve:
        cache = cache_format or "model"
        return _serve(model, machine, quantize, context, 1 if batch is None else batch, cache, as_json=as_json)
    about_serving = (("quantize", quantize), ("context", context), ("batch", batch), ("cache-format", cache_format))
    for name, given in about_serving:
        if given is not None:
            raise UserError(f"--{name} is {given}, which is about serving; add --serve or leave it out")
    from tightfit.plan.answer import answer
    from tightfit.report.plan import print_answer
    from tightfit.report.waiting import waiting

    question = _question(
        model,
        machine,
        seq=seq,
        rows=global_batch,
        batch_tokens=batch_tokens,
        precision=precision,
        engine=engine,
        steps=steps,
        tokens=tokens,
        pins=pin or [],
        lossy=allow_lossy,
    )
    question = _with_adapters(question, adapter, bits)
    _check_outputs(save, export or [])
    with waiting(f"looking through the layouts of {machine.ranks:,} GPUs"):
        found = answer(question)
    with waiting("rehearsing the step on fake tensors"):
        extra = _more(found.plan, confirm=confirm, compare_estimators=compare_estimators)
    said = []
    if save is not None:
        found.plan.save(save)
        said.append(f"wrote {save}; run it with `tightfit train {save}`")
    if export:
        from tightfit.plan.export.files import export as write_export

        said += [line for wanted in export for line in write_export(found.plan, wanted)]
    frozen = found.plan.workload.adapted is not None
    if not frozen and (small := _compressed_weights(found.plan.model, found.plan.workload.spec)) is not None:
        extra["expanded"] = small.description
        said.append(f"{found.plan.model} is compressed ({small.description}); training expands it and counts all of it")
    print_answer(found, as_json=as_json, extra=extra, said=said)
    if not found.plan.fits:
        raise typer.Exit(DOES_NOT_FIT)


def _with_adapters(question: "Question", rank: int | None, bits: int | None) -> "Question":
    """The question with adapters on its model, where options ask for some."""
    from tightfit.errors import UserError

    if rank is not None:
        return question.with_adapters({"rank": rank} if bits is None else {"rank": rank, "bits": bits})
    if bits is not None:
        raise UserError(f"--bits is {bits}, which is of a model under adapters; add --adapter RANK or leave it out")
    return question


def _check_outputs(save: Path | None, exports: list[str]) -> None:
    """Refuse what could not be written, before a plan is looked for."""
    if save is not None:
        from tightfit.plan.plan import refuse_overwriting

        refuse_overwriting(save)
    if exports:
        from tightfit.plan.export.files import check_export

        for wanted in exports:
            check_export(wanted)


def _shape(job: "Job") -> dict[str, int]:
    """What a job changes of its model: the sizes it gives, and the vocabulary that will be trained."""
    from tightfit.jobs.job import rounded_vocabulary

    trained = {"vocab_size": rounded_vocabulary(job.tokenizer.vocab_size)} if job.tokenizer.source == "train" else {}
    return dict(job.model.shape) | trained


def _question(
    model: str,
    machine: "Machine",
    *,
    seq: int | None,
    rows: int | None,
    batch_tokens: str | None,
    precision: Any,
    engine: str,
    steps: int | None,
    tokens: str | None,
    pins: list[str],
    lossy: bool,
) -> "Question":
    """The question behind the options; a job file's fields count where an option does not say otherwise."""
    from tightfit.hardware.sizes import parse_count
    from tightfit.jobs.engine import find_engine
    from tightfit.jobs.workload import with_teacher
    from tightfit.models.presets import PRESETS
    from tightfit.models.resolve import reshaped, resolve_spec
    from tightfit.plan.answer import Question, make_workload, steps_of
    from tightfit.plan.search.pins import parse_pins

    job: dict[str, Any] = {}
    shape: dict[str, int] = {}
    taught: Any = None
    if model.endswith(JOB_FILES):
        from tightfit.jobs.load import load_job
        from tightfit.jobs.paths import with_absolute_paths

        loaded = with_absolute_paths(load_job(Path(model)), Path(model).parent)
        job = loaded.model_dump(mode="json", exclude={"layout", "levers"}, exclude_unset=True)
        pins = [*_decided("layout", loaded.layout), *_decided("levers", loaded.levers), *pins]
        seq = loaded.data.sequence_length if seq is None else seq
        precision = precision or _known(loaded.precision)
        rows = loaded.global_batch if rows is None and batch_tokens is None else rows
        steps = loaded.steps if steps is None and tokens is None else steps
        model, shape, taught = loaded.model.source, _shape(loaded), loaded
    spec = reshaped(resolve_spec(model), shape, model)
    spec = spec if taught is None else taught.experts.applied(spec)
    if not job and model not in PRESETS:
        job = _of_files(model)
    step_tokens = parse_count(batch_tokens, "--batch-tokens") if batch_tokens else None
    workload = make_workload(
        spec,
        machine,
        sequence_length=seq,
        rows=rows,
        tokens=step_tokens,
        precision=precision,
        engine=find_engine(engine).name,
    )
    if taught is not None:
        workload = with_teacher(workload, taught)
    return Question(
        model=model,
        workload=workload,
        machine=machine,
        pins=parse_pins(pins),
        lossy=lossy,
        positions=spec.max_positions,
        steps=steps_of(workload, steps, parse_count(tokens, "--tokens") if tokens else None),
        job=job,
    )


def _of_files(model: str) -> dict[str, Any]:
    """What a job says of a model that is not a preset."""
    from tightfit.jobs.paths import absolute  # with the schema of a whole job, which a preset needs not

    return {"model": {"source": str(absolute(Path(model).expanduser()))}}


def _decided(section: str, fields: Any) -> list[str]:
    """What a job file says of its layout or levers, as pins."""
    decided = {name: getattr(fields, name) for name in fields.model_fields_set}
    return [f"{section}.{name}={'null' if value is None else value}" for name, value in decided.items()]


def _known(precision: str) -> str | None:
    return None if precision == "auto" else precision


def _more(plan: "Plan", *, confirm: bool, compare_estimators: bool) -> dict[str, Any]:
    """What the options add to the answer."""
    extra: dict[str, Any] = {}
    if confirm:
        from tightfit.prove.rehearsal import rehearse

        extra["simulation"] = plan.confirmed(rehearse(plan.workload, plan.layout, plan.levers))
    if compare_estimators:
        from tightfit.report.estimators import estimates

        extra["estimators"] = [estimate.to_json() for estimate in estimates(plan)]
    return extra


def _compressed_weights(model: str, spec: "ModelSpec") -> "HeldWeights | None":
    """What the weights of a compressed model take, where `model` is the directory of one."""
    from tightfit.models.presets import PRESETS

    folder = Path(model).expanduser()
    if model in PRESETS or not (folder / "config.json").is_file():
        return None
    from tightfit.jobs.served_weights import served_weights

    return served_weights(folder, spec)


def _serve(
    model: str,
    machine: "Machine",
    quantize: str | None,
    context: int | None,
    batch: int,
    cache: Literal["model", "int8", "fp8"],
    *,
    as_json: bool,
) -> None:
    from tightfit.plan.serving import make_serving
    from tightfit.report.plan import print_serving

    spec, stored = _served_model(model)
    compressed = _compressed_weights(model, spec) if quantize is None else None
    asked = make_serving(model, spec, machine, quantize or stored, context, batch, cache, compressed)
    print_serving(asked, as_json=as_json)
    if not asked.fits:
        raise typer.Exit(DOES_NOT_FIT)


def _served_model(model: str) -> "tuple[ModelSpec, str]":
    """The shape of what `tightfit serve` takes, and what its weights are in; runs and GGUF files need torch."""
    from tightfit.models.hub import is_hub_name
    from tightfit.models.presets import PRESETS
    from tightfit.models.resolve import resolve_spec

    path = Path(model).expanduser()
    if model in PRESETS or is_hub_name(model) or path.suffix == ".json" or (path / "config.json").is_file():
        return resolve_spec(model), "bf16"
    from tightfit.models.loading import source_format, source_spec

    return source_spec(model), source_format(model)
