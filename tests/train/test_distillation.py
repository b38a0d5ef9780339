"""A student and its teacher: what a step minimises, where the teacher's bytes are, and what is refused."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.train.jobs import checkpoint_files
from tightfit.compress.compression import CompressionJob, compress
from tightfit.compress.recipe import recipe_of
from tightfit.compress.structure.factoring import FactoringJob, factorise
from tightfit.errors import UserError
from tightfit.hardware.machine import parse_machine
from tightfit.jobs.distill import Distill
from tightfit.jobs.job import Job
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.teacher import Teacher, held_weight_bytes
from tightfit.jobs.workload import Workload, with_teacher
from tightfit.kernels.loss.linear_distillation import DistillationTerms, linear_distillation_eager
from tightfit.memory.formulas.training import training_ledger
from tightfit.models.decoder import Decoder, Layer
from tightfit.models.initialisation import init_weights
from tightfit.models.loading import load_model
from tightfit.models.presets import preset
from tightfit.models.resolve import checkpoints_of
from tightfit.models.saving import write_model
from tightfit.models.spec import ModelSpec
from tightfit.plan.cost import Costs
from tightfit.train.distillation import Distiller, HostedTeacher, projection
from tightfit.train.loop import run_job
from tightfit.train.relations import attention_map

SPEC = replace(preset("tiny-llama"), vocab_size=96, layers=3)
WIDER = replace(SPEC, hidden_size=2 * SPEC.hidden_size, layers=6)


def made(spec: ModelSpec, seed: int) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(spec)
    init_weights(model)
    return model


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 96, (2, 12), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
    return tokens, labels, documents


def test_a_step_minimises_the_formula() -> None:
    student, teacher = made(SPEC, 1), made(WIDER, 2)
    settings = Distill(teacher="t", alpha=0.3, temperature=1.5, divergence="reverse")
    tokens, labels, documents = batch()
    plain = student(tokens, labels, documents=documents).loss
    student.objective = Distiller(student, HostedTeacher(teacher, torch.device("cpu")), settings)
    loss = student(tokens, labels, documents=documents, divisor=7.0).loss
    loss.backward()
    found = {name: p.grad for name, p in student.named_parameters()}
    with torch.no_grad():
        assert torch.equal(student(tokens, labels, documents=documents).loss, plain)  # evaluation is as ever
        taught = teacher(tokens, documents=documents).logits
    exact = Decoder(SPEC).double()
    exact.load_state_dict(student.state_dict())
    logits = exact(tokens, documents=documents).logits
    eye = torch.eye(96, dtype=torch.float64)
    terms = DistillationTerms(alpha=0.3, temperature=1.5, divergence="reverse")
    rows = linear_distillation_eager(
        logits.flatten(0, 1), eye, taught.double().flatten(0, 1), eye, labels.flatten(), terms
    )
    wanted = rows.sum() / 7
    wanted.backward()
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-4, atol=1e-5)
    for name, parameter in exact.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name].double(), parameter.grad, rtol=1e-3, atol=1e-5)
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_features_are_compared_layer_by_layer() -> None:
    """Against hidden states that are computed apart, with the projection for other widths."""
    student, teacher = made(SPEC, 1), made(WIDER, 2)
    tokens, labels, _ = batch()
    settings = Distill(teacher="t", alpha=0.0, features=0.7, feature_layers=2)
    distiller = Distiller(student, HostedTeacher(teacher, torch.device("cpu")), settings)
    assert (distiller.student_layers, distiller.teacher_layers) == ([0, 2], [1, 5])
    plain = student(tokens, labels).loss
    student.objective = distiller
    loss = student(tokens, labels).loss
    through = projection(WIDER.hidden_size, SPEC.hidden_size)
    assert through is not None
    torch.testing.assert_close(through.T @ through, torch.eye(SPEC.hidden_size), atol=1e-5, rtol=0)
    distances = []
    for mine, theirs in zip((0, 2), (1, 5), strict=True):
        a, b = _after(student, mine, tokens), _after(teacher, theirs, tokens) @ through
        a, b = (x / x.square().mean(-1, keepdim=True).sqrt() for x in (a, b))
        distances.append(((a - b).square().mean(-1) * (labels != -100)).sum())
    wanted = plain + 0.7 * torch.stack(distances).mean()
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-4)
    loss.backward()
    assert float(student.get_parameter("layers.0.mlp.up.weight").grad.abs().sum()) > 0


def their_maps(model: Decoder, folder: Path, tokens: Tensor) -> list[Tensor]:
    """Attention maps of every layer as transformers computes them, averaged over heads."""
    write_model(folder, model, None)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        return [found.mean(1) for found in theirs(tokens, output_attentions=True).attentions]


def test_attention_maps_are_compared(tmp_path: Path) -> None:
    """Against the maps of transformers; heads differ in number, so maps are averaged over them."""
    student, teacher = made(SPEC, 1), made(replace(WIDER, heads=2 * WIDER.heads, head_dim=WIDER.head_dim), 2)
    tokens, labels, _ = batch()
    settings = Distill(teacher="t", alpha=0.0, attention=0.7, feature_layers=2)
    plain = student(tokens, labels).loss
    student.objective = Distiller(student, HostedTeacher(teacher, torch.device("cpu")), settings)
    loss = student(tokens, labels).loss
    folders = [tmp_path / "student", tmp_path / "teacher"]
    for folder in folders:
        folder.mkdir()
    mine, theirs = (their_maps(m, f, tokens) for m, f in zip((student, teacher), folders, strict=True))
    counted = labels != -100
    distances = []
    for a, b in ((mine[0], theirs[1]), (mine[2], theirs[5])):
        ratio = torch.where(b > 0, (b / a.clamp(min=1e-30)).log(), 0)
        distances.append(((b * ratio).sum(-1) * counted).sum())
    torch.testing.assert_close(loss, plain + 0.7 * torch.stack(distances).mean(), rtol=1e-4, atol=1e-4)
    loss.backward()
    assert float(student.get_parameter("layers.0.attention.q.weight").grad.abs().sum()) > 0


@torch.no_grad()
def test_maps_stay_inside_documents() -> None:
    model = made(SPEC, 1)
    tokens, _, documents = batch()
    positions = model.token_positions(tokens, documents, None)
    x = model.embed_tokens(tokens, positions)
    ctx = model.forward_context(x, positions, documents, None)
    layer = model.layers[0]
    assert isinstance(layer, Layer)
    found = attention_map(layer.attention, layer.attention_norm(x), ctx, documents)
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 12))
    assert float(found[0, 5:, :5].abs().max()) == 0
    assert float(found[1, 11, 0]) > 0


def test_embeddings_are_told_apart() -> None:
    """Token by token, as the formula says; tokens that do not count are neither asked nor compared with."""
    student, teacher = made(SPEC, 1), made(WIDER, 2)
    tokens, labels, _ = batch()
    plain = student(tokens, labels).loss
    settings = Distill(teacher="t", alpha=0.0, contrastive=0.4)
    student.objective = Distiller(student, HostedTeacher(teacher, torch.device("cpu")), settings)
    loss = student(tokens, labels).loss
    through = projection(WIDER.hidden_size, SPEC.hidden_size)
    assert through is not None
    with torch.no_grad():
        mine = student.norm(_after(student, 2, tokens))[labels != -100]
        theirs = (teacher.norm(_after(teacher, 5, tokens)) @ through)[labels != -100]
    total = torch.zeros(())
    for i in range(len(mine)):
        likeness = torch.stack([torch.cosine_similarity(mine[i], other, dim=0) for other in theirs]) / 0.1
        total = total - likeness.log_softmax(0)[i]
    torch.testing.assert_close(loss, plain + 0.4 * total, rtol=1e-4, atol=1e-3)


@torch.no_grad()
def _after(model: Decoder, layer: int, tokens: Tensor) -> Tensor:
    positions = model.token_positions(tokens, None, None)
    x = model.embed_tokens(tokens, positions)
    for each in list(model.layers)[: layer + 1]:
        x, _ = each(x, model.forward_context(x, positions, None, None))
    return x


def test_its_own_teacher_says_nothing_new() -> None:
    student = made(SPEC, 1)
    tokens, labels, _ = batch()
    again = Decoder(SPEC)
    again.load_state_dict(student.state_dict())
    student.objective = Distiller(student, HostedTeacher(again, torch.device("cpu")), Distill(teacher="m", alpha=1.0))
    assert float(student(tokens, labels).loss.detach()) < 1e-4


@pytest.fixture
def learning(make_small: Callable[..., Job], a_small_run: Path) -> Callable[..., Job]:
    """Jobs whose student is half as wide as the run it learns from."""
    teacher = str(checkpoints_of(a_small_run)[-1])
    vocabulary = load_model(teacher).model.spec.vocab_size
    shape = {"layers": 1, "hidden_size": 16, "mlp_size": 24, "vocab_size": vocabulary}

    def job(name: str = "student", distill: dict[str, Any] | None = None, **changes: Any) -> Job:
        fields: dict[str, Any] = {
            "model": {"source": "tiny-llama", "shape": shape},
            "tokenizer": {"source": teacher},
            "distill": {"teacher": teacher, **(distill or {})},
            "steps": 4,
            "saving": {"every": 2, "keep": 3},
        }
        return make_small(name, **{**fields, **changes})

    return job


def test_a_run_with_a_teacher_resumes_bit_for_bit(learning: Callable[..., Job]) -> None:
    whole = run_job(learning("whole"), quiet=True)
    run_job(learning("parts"), quiet=True, stop_after=2)
    parts = run_job(learning("parts"), quiet=True, resume=True)
    assert checkpoint_files(whole.checkpoint) == checkpoint_files(parts.checkpoint)
    plain = run_job(learning("plain", distill={"alpha": 0.0}), quiet=True)
    assert checkpoint_files(whole.checkpoint) != checkpoint_files(plain.checkpoint)


def test_the_tokenizer_of_a_run_is_that_of_its_newest_checkpoint(
    learning: Callable[..., Job], a_small_run: Path
) -> None:
    """As refusals advise, `tokenizer.source` may be what `distill.teacher` is."""
    run = str(a_small_run)
    assert run_job(learning(distill={"teacher": run}, tokenizer={"source": run}, steps=1), quiet=True).step == 1


def test_a_run_is_resumed_with_the_teacher_it_began_with(learning: Callable[..., Job], tmp_path: Path) -> None:
    """Wherever it lies; other weights in its place, or no teacher at all, went on silently."""
    teacher = Path(str(learning().distill.teacher))
    moved = [tmp_path / "moved", tmp_path / "other"]
    for folder in moved:
        shutil.copytree(teacher, folder)
    shutil.copyfile(teacher.parent / "step-00000001" / "model.safetensors", moved[1] / "model.safetensors")
    (moved[1] / "checksums.json").unlink()
    run_job(learning(), quiet=True, stop_after=2)
    for changes in ({"distill": {"teacher": str(moved[1])}}, {"distill": {"teacher": None}}):
        with pytest.raises(UserError, match=r"made with teacher \w+, this run has .* resume with the teacher it was"):
            run_job(learning("student", **changes), quiet=True, resume=True)
    assert run_job(learning("student", distill={"teacher": str(moved[0])}), quiet=True, resume=True).step == 4


def test_a_checkpoint_that_says_nothing_of_its_teacher_is_gone_on_with(learning: Callable[..., Job]) -> None:
    stopped = run_job(learning(), quiet=True, stop_after=2)
    state = stopped.checkpoint / "training" / "state.json"
    content = json.loads(state.read_text())
    del content["facts"]["teacher"]
    state.write_text(json.dumps(content))
    assert run_job(learning(), quiet=True, resume=True).step == 4


@pytest.fixture
def smaller_teachers(learning: Callable[..., Job], tmp_path: Path) -> dict[str, Path]:
    """The teacher in 4 bits, and in factors of low rank."""
    given: dict[str, Any] = {
        "model": str(learning().distill.teacher),
        "samples": 2,
        "length": 16,
        "cache": tmp_path / "cache",
    }
    made = {name: tmp_path / name for name in ("coded", "factored")}
    coding = CompressionJob(out=made["coded"], recipe=recipe_of("rtn", bits=4, group=8), **given)
    compress(coding, lambda cost: None, lambda done, total, layer: None)
    factorise(FactoringJob(out=made["factored"], **given), lambda cost: None, lambda done, total, layer: None)
    return made


@pytest.mark.parametrize("name", ["coded", "factored"])
def test_a_run_with_a_compressed_teacher_resumes_bit_for_bit(
    name: str, learning: Callable[..., Job], smaller_teachers: dict[str, Path]
) -> None:
    """From the host, with everything that is compared."""
    losses = {"features": 1.0, "feature_layers": 1, "attention": 0.5, "contrastive": 0.1}
    distill = {"teacher": str(smaller_teachers[name]), "place": "host", **losses}
    whole = run_job(learning("whole", distill=distill), quiet=True)
    run_job(learning("parts", distill=distill), quiet=True, stop_after=2)
    parts = run_job(learning("parts", distill=distill), quiet=True, resume=True)
    assert checkpoint_files(whole.checkpoint) == checkpoint_files(parts.checkpoint)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_plan_counts_a_compressed_teacher_as_it_is_held(
    dtype: torch.dtype, smaller_teachers: dict[str, Path]
) -> None:
    for source in map(str, smaller_teachers.values()):
        teacher = load_model(source, dtype=dtype).model
        held = sum(tensor.nbytes for tensor in (*teacher.parameters(), *teacher.buffers()))
        assert held_weight_bytes(source, teacher.spec, dtype.itemsize) == held


def test_features_and_other_divergences_train(learning: Callable[..., Job]) -> None:
    settings = {"divergence": "jsd", "features": 1.0, "feature_layers": 1, "place": "host", "attention": 1.0}
    result = run_job(learning("jsd", distill=settings), quiet=True)
    assert result.end is not None
    assert result.start is not None
    assert result.end.loss < result.start.loss


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"source": "tiny-llama", "shape": {"vocab_size": 1024}}}, "a vocabulary of"),
        ({"distill": {"teacher": "tiny-llama"}}, "no weights"),
        ({"distill": {"teacher": "absent"}}, "absent.* neither a model preset nor a directory"),
        ({"distill": {"features": 1.0, "feature_layers": 2}}, "has 1 layers"),
    ],
)
def test_teachers_that_cannot_teach(changes: dict[str, Any], said: str, learning: Callable[..., Job]) -> None:
    job = learning("refused", **changes)
    with pytest.raises(UserError, match=said):
        run_job(job, quiet=True)
    assert not job.output.exists()


def test_a_teacher_with_a_coded_projection_is_refused(learning: Callable[..., Job], tmp_path: Path) -> None:
    teacher = str(learning().distill.teacher)
    coding = CompressionJob(model=teacher, out=tmp_path / "coded", recipe=recipe_of("rtn", bits=4, group=8, head=8))
    compress(coding, lambda cost: None, lambda done, total, layer: None)
    job = learning("refused", distill={"teacher": str(tmp_path / "coded")})
    with pytest.raises(UserError, match="whose output projection is coded; give a teacher that was compressed without"):
        run_job(job, quiet=True)
    assert not job.output.exists()


def test_a_section_without_teacher_is_refused(make_small: Callable[..., Job]) -> None:
    with pytest.raises(ValueError, match="no teacher"):
        make_small("x", distill={"alpha": 0.3})


def test_the_teacher_is_in_the_plan(learning: Callable[..., Job]) -> None:
    job = learning()
    teacher = load_model(str(job.distill.teacher)).model
    held = sum(parameter.nbytes for parameter in teacher.parameters())
    spec = replace(teacher.spec, hidden_size=16, mlp_size=24)
    plain = Workload(spec=spec, sequence_length=32, global_batch=4, precision="fp32")
    ledgers = {
        place: training_ledger(with_teacher(plain, learning(distill={"place": place})), Layout(), Levers())
        for place in ("device", "host")
    }
    for place, ledger in ledgers.items():
        where = "gpu" if place == "device" else "host"
        kept = [x for x in ledger.lines if x.detail == "teacher" and x.component == "weights" and x.phase == "backward"]
        assert [(line.place, line.bytes) for line in kept] == [(where, held)]
        hidden = 4 * 32 * teacher.spec.hidden_size
        assert ledger.total(lambda x: x.detail == "teacher" and x.component == "activations") >= hidden
        assert not [x for x in ledger.lines if x.detail == "to be written" and x.bytes == held]
    without = training_ledger(plain, Layout(), Levers())
    assert ledgers["device"].peak_bytes() >= without.peak_bytes() + held


def test_a_teacher_takes_time_in_the_plan() -> None:
    """Three times the student's own forward pass for three times its layers; from the host, the link's time more."""
    machine = parse_machine("H100-80GB")
    spec = preset("llama-3.2-1b")
    plain = Workload(spec=spec, sequence_length=1024, global_batch=8)
    layout, levers = Layout(micro_batch=8), Levers()
    alone = Costs(plain, machine).step(layout, levers)
    times = {}
    for place in ("device", "host"):
        teacher = Teacher(spec=replace(spec, layers=3 * spec.layers), weight_bytes=10**10, place=place)
        times[place] = Costs(replace(plain, teacher=teacher), machine).step(layout, levers)
    layer = Costs(plain, machine).layer(layout)
    own = 3 * spec.layers * layer.passes.forward_s + layer.head_forward_s
    assert times["device"].teacher_s == pytest.approx(own)
    assert times["device"].step_s == pytest.approx(alone.step_s + own)
    assert times["host"].teacher_s - own == pytest.approx(10**10 / machine.accelerator.host.copy_bytes_s)
