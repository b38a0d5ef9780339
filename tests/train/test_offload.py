"""States and weights on the host: every bit as if they had stayed, whatever the mixture; saved, resumed, refused."""

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.covering import covering, sampled
from tests.train.jobs import SMALL_RUN, checkpoint_files, tiny_job
from tests.train.models import TINY, TINY_ROUTED, assert_trained_alike, ragged_batch, tiny_model
from tightfit.errors import UserError
from tightfit.jobs.job import Optimizer
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.kernels.optimizer.adamw import Numbers
from tightfit.levers import host_update, state_link
from tightfit.levers.host_update import fused_adamw
from tightfit.levers.offload import placements
from tightfit.levers.policy.offload import IN_FLIGHT_BYTES
from tightfit.memory.simulation import fake_world
from tightfit.models.decoder import Decoder, Implementations
from tightfit.models.initialisation import init_weights
from tightfit.models.presets import preset
from tightfit.models.spec import ModelSpec
from tightfit.parallel.mesh import make_mesh
from tightfit.prove.rehearsal import build, rehearse
from tightfit.train.assembly import assemble
from tightfit.train.loop import run_job
from tightfit.train.optimizer.adamw import MasterAdamW
from tightfit.train.precision import LossScale
from tightfit.train.step import ignore, train_step

CPU = torch.device("cpu")
EVERYTHING = 2**40
SETTINGS = Optimizer(lr=1e-2, clip_norm=0.5)


@pytest.fixture(autouse=True)
def _many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of the tiny model travel in several pieces, the last of them ragged, and not all of them at once."""
    monkeypatch.setattr(state_link, "PIECE_ELEMENTS", 32 * 7)
    monkeypatch.setattr(state_link, "IN_FLIGHT_BYTES", 8192)


def assembled(precision: Any, spec: ModelSpec = TINY, **levers: Any) -> tuple[Decoder, MasterAdamW, LossScale]:
    model = tiny_model(spec)
    chosen = Levers(**{"checkpoint_every": 1, **levers})
    _, optimizer = assemble(model, None, Layout(), chosen, precision, SETTINGS, CPU, lambda decoder: None, seed=3)
    return model, optimizer, LossScale.for_precision(precision)


def weights(model: Decoder, optimizer: MasterAdamW) -> dict[str, Tensor]:
    assert optimizer.offloading is not None
    return {name: tensor.clone() for name, tensor in optimizer.offloading.weights(model).items()}


def trained(
    precision: Any, steps: int = 3, accumulation: int = 1, spec: ModelSpec = TINY, **levers: Any
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses and norms, weights, and states after some steps on ragged, packed rows."""
    model, optimizer, scale = assembled(precision, spec, **levers)
    results = []
    for step in range(steps):
        batches = [ragged_batch(3, seed=10 * step + part) for part in range(accumulation)]
        result = train_step(model, optimizer, batches, CPU, 1e-2, scale)
        results += [result.loss, result.gradient_norm]
    return results, weights(model, optimizer), optimizer.state()


def assert_same(ours: Any, theirs: Any) -> None:
    assert ours[0] == theirs[0]
    for own, other in zip(ours[1:], theirs[1:], strict=True):
        assert own.keys() == other.keys()
        for name in own:
            assert torch.equal(own[name], other[name]), name


@pytest.mark.parametrize("levers", [{}, {"update_in_backward": True, "offload_gradient_bytes": 2**30}])
def test_what_is_put_off_goes_in_the_order_of_the_forward_pass(
    monkeypatch: pytest.MonkeyPatch, levers: dict[str, Any]
) -> None:
    """An untied head is needed last, and a layer's update is on its way no later than when the layer runs."""
    model, optimizer, scale = assembled("fp32", offload="optimizer", **levers)
    assert optimizer.offloading is not None
    assert model.head.weight is not model.embed.weight
    link, names = (
        optimizer.offloading.link,
        {id(matrix): name for name, matrix in optimizer.offloading.matrices.items()},
    )
    sent: list[str] = []
    send = link._send
    monkeypatch.setattr(link, "_send", lambda update: (sent.append(names[id(update.matrix)]), send(update)))
    train_step(model, optimizer, [ragged_batch(3, seed=1)], CPU, 1e-2, scale)
    is_few = optimizer.levers.update_in_backward  # and sent at once when backward is over
    waiting = [name for name in sent if name.startswith("layers.")] if is_few else []
    waiting += [names[id(update.matrix)] for update in link.deferred]
    order = ["embed", *(f"layers.{index}" for index in range(len(model.layers))), "head"]
    places = [next(place for place, start in enumerate(order) if name.startswith(start + ".")) for name in waiting]
    assert places == sorted(places)
    assert [name for name in waiting if name.startswith("layers.")]
    assert set(sent) & set(waiting) == (set(waiting) if is_few else set())
    done_before = len(sent)
    model(torch.zeros(1, 4, dtype=torch.long))
    assert sent[done_before:] == ([] if is_few else waiting)
    assert not link.deferred
    assert not link.in_flight


MIXTURES: list[tuple[str, dict[str, Any]]] = [
    ("fp32", {}),
    ("bf16", {}),
    ("fp16", {}),
    ("bf16", {"update_in_backward": True}),
    ("fp32", {"update_in_backward": True, "offload_gradient_bytes": 2**30}),
    ("fp32", {"update_in_backward": True, "offload_gradient_bytes": 0}),
    ("bf16", {"optimizer_states": "8bit"}),
    ("pure-bf16", {"rounding": "stochastic", "update_in_backward": True}),
    ("fp32", {"offload_keep_bytes": 60_000}),
    ("fp32", {"tiles": 3}),
    ("fp32", {"tiles": 3, "update_in_backward": True, "offload_checkpoints": True}),
    ("fp32", {"checkpoint_keep": "attention", "offload_checkpoints": True, "checkpoint_host_bytes": 10_000}),
]


@sampled(5)
@pytest.mark.parametrize(
    ("offload", "mixture"), covering(list(product(("optimizer", "weights"), MIXTURES)), pairs=True)
)
def test_what_left_is_what_stayed(offload: str, mixture: tuple[str, dict[str, Any]]) -> None:
    """Against the same kernels over states that stay, to the bit."""
    precision, levers = mixture
    assert_same(trained(precision, **levers, offload=offload), stayed(precision, *levers.items()))


@cache
def stayed(precision: str, *levers: tuple[str, Any]) -> Any:
    """What is trained with states that stay."""
    return trained(precision, **{**dict(levers), "offload": "optimizer", "offload_keep_bytes": EVERYTHING})


@pytest.mark.parametrize("offload", ["optimizer", "weights"])
def test_accumulation_and_routed_layers(offload: str) -> None:
    stayed = trained("fp32", accumulation=2, spec=TINY_ROUTED, offload="optimizer", offload_keep_bytes=EVERYTHING)
    assert_same(trained("fp32", accumulation=2, spec=TINY_ROUTED, offload=offload), stayed)


def test_it_is_the_training_that_torch_does() -> None:
    """The kernels are ours where states may leave; torch's fused AdamW differs by rounding."""
    plain, plain_optimizer = tiny_model(), None
    _, plain_optimizer = assemble(plain, None, Layout(), Levers(), "fp32", SETTINGS, CPU, lambda decoder: None)
    for step in range(3):
        train_step(plain, plain_optimizer, [ragged_batch(3, seed=10 * step)], CPU, 1e-2, LossScale())
    _, ours, _ = trained("fp32", offload="weights")
    assert_trained_alike(ours, plain.state_dict())


@sampled(2)
@pytest.mark.parametrize("offload", ["optimizer", "weights"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_host_that_updates_differs_by_rounding(offload: str, inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's CPU kernel instead of ours. Both get the gradients of the first step, so that their states differ by the
    roundings of one update in float32.

    Later a master that falls on the other side of an edge gives a weight that is off by bf16's spacing, 2⁻⁸, and a few
    gradients with it: states are compared as wholes then, masters by how far they have moved.
    """
    pieces: list[Numbers] = []
    monkeypatch.setattr(host_update, "fused_adamw", lambda *given: (pieces.append(given[4]), fused_adamw(*given)))
    levers: dict[str, Any] = {"offload": offload, "update_in_backward": inside}
    spacing = torch.finfo(torch.float32).eps
    (_, _, ours), (_, _, there) = (trained("bf16", 1, **levers, offload_update=who) for who in ("gpu", "host"))
    for name, state in ours.items():
        assert torch.allclose(there[name], state, rtol=8 * spacing, atol=8 * spacing * SETTINGS.lr), name
    assert {numbers.step for numbers in pieces} == {1}, "the host has updated"
    (results, _, ours), (found, _, there) = (trained("bf16", **levers, offload_update=who) for who in ("gpu", "host"))
    assert found == pytest.approx(results, rel=2**-8)
    start = tiny_model().state_dict()
    for name, state in ours.items():
        kind, _, parameter = name.partition("/")
        size = (state - start[parameter]).norm() if kind == "master" else state.norm()
        assert (there[name] - state).norm() <= 2**-6 * size, name


@pytest.mark.parametrize("levers", [{"offload": "optimizer"}, {"offload": "weights", "update_in_backward": True}])
def test_a_run_resumes_where_it_stopped(
    tmp_path: Path, corpus: Path, token_cache: Path, levers: dict[str, Any]
) -> None:
    """Five steps are three and two, to the bit of every file; and the files are a model that others can load."""
    changes: dict[str, Any] = {"steps": 5, "layout": {"micro_batch": 4}, "model": SMALL_RUN["model"]}
    made = {"levers": {"checkpoint_every": 1, **levers}, **changes}
    whole, parts = (tiny_job(tmp_path / name, corpus, token_cache, **made) for name in ("whole", "parts"))
    straight = run_job(whole, quiet=True)
    run_job(parts, stop_after=3, quiet=True)
    second = run_job(parts, resume=True, quiet=True)
    assert checkpoint_files(straight.checkpoint) == checkpoint_files(second.checkpoint)
    usual = run_job(tiny_job(tmp_path / "usual", corpus, token_cache, **changes), quiet=True)
    assert straight.end is not None
    assert usual.end is not None
    close = 1e-3 if levers["offload"] == "optimizer" else 0.05  # which clips by an estimate of the norm
    assert straight.end.loss == pytest.approx(usual.end.loss, abs=close)


def test_who_stays_and_who_is_late() -> None:
    named = list(tiny_model().named_parameters())
    state_bytes = 8.0
    embed = 96 * 32 * 8
    found = placements(named, Levers(offload="optimizer", offload_keep_bytes=2 * embed + 32 * 32 * 8), state_bytes)
    stays = [name for name, place in found.items() if not place.states_offloaded]
    assert {name for name in stays if "norm" not in name} == {
        "embed.weight",
        "head.weight",
        "layers.0.attention.q.weight",
    }
    levers = Levers(
        offload="weights",
        checkpoint_every=1,
        update_in_backward=True,
        offload_gradient_bytes=IN_FLIGHT_BYTES + 2 * 64 * 32 * 4,
    )
    found = placements(named, levers, state_bytes)
    assert [name for name, place in found.items() if place.deferred] == [
        "layers.1.mlp.up.weight",
        "layers.1.mlp.down.weight",
    ]
    assert not found["embed.weight"].weight_offloaded
    assert found["layers.0.mlp.up.weight"].weight_offloaded


def test_the_ledger_has_states_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """12 bytes a weight of every matrix; on the GPU none of these, and of the layers the weights of two."""
    monkeypatch.setattr(state_link, "PIECE_ELEMENTS", 2**20)
    spec = TINY.__class__(**{**TINY.__dict__, "hidden_size": 128, "mlp_size": 512, "layers": 6, "head_dim": 32})
    workload = Workload(spec=spec, sequence_length=64, global_batch=1, precision="bf16")
    base: dict[str, Any] = {"checkpoint_every": 1, "update_in_backward": True}
    ledgers = {
        offload: rehearse(workload, Layout(micro_batch=1), Levers(offload=offload, **base))
        for offload in ("none", "optimizer", "weights")
    }
    with torch.device("meta"):
        named = dict(Decoder(spec).named_parameters())
    matrices = sum(p.numel() for p in named.values() if p.ndim > 1)
    layer = sum(p.numel() for name, p in named.items() if name.startswith("layers.0.") and p.ndim > 1)

    def held(offload: str, component: str, place: str = "gpu") -> int:
        lines = [x for x in ledgers[offload].lines if x.component == component and x.place == place]
        return sum(x.bytes for x in lines if x.phase == "backward")

    for offload in ("optimizer", "weights"):
        assert held(offload, "master weights", "host") == pytest.approx(4 * matrices, rel=0.01)
        assert held(offload, "optimizer states", "host") == pytest.approx(8 * matrices, rel=0.01)
        assert held(offload, "optimizer states") < 0.02 * held("none", "optimizer states")
    saved = held("optimizer", "weights") - held("weights", "weights")
    assert saved == pytest.approx(2 * layer * (spec.layers - 2), rel=0.05)


@pytest.mark.parametrize(
    ("levers", "layout", "words"),
    [
        ({"offload": "weights"}, {}, "levers.checkpoint_every is 0; set it to 1"),
        ({"offload": "optimizer", "optimizer_states": "factored"}, {}, "take 8bit"),
    ],
)
def test_refusals(levers: dict[str, Any], layout: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        assemble(tiny_model(), None, Layout(**layout), Levers(**levers), "fp32", SETTINGS, CPU, lambda decoder: None)


@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_nothing_refers_to_the_buckets_that_ddp_leaves_after_the_first_step(offload: Any) -> None:
    """DDP makes new buckets when the second forward pass begins; with what still refers to the first, both exist."""
    workload = Workload(spec=preset("tiny-llama"), sequence_length=8, global_batch=2, precision="fp32")
    layout = Layout(micro_batch=1, data=2)
    seen: list[tuple[int, set[int]]] = []
    with fake_world(2):
        mesh, levers = make_mesh(layout, "cpu"), Levers(offload=offload)
        program = build(workload, layout, levers, CPU, Implementations(), mesh, fill=init_weights)
        for _ in range(3):
            program.step(ignore)
            gradients = [parameter.grad for parameter in program.decoder.parameters() if parameter.grad is not None]
            buckets = {gradient.untyped_storage().data_ptr() for gradient in gradients}
            offloading = program.optimizer.offloading
            assert (offloading is not None) == (offload == "optimizer")
            seen.append((0 if offloading is None else len(offloading.link.in_flight), buckets))
    assert seen[0] == (0, set())
    assert (seen[1][0] > 0) == (offload == "optimizer"), "later steps leave updates to the next one's forward pass"
    assert seen[1][1], "gradients are zeroed in their buckets"
    assert seen[1][1] == seen[2][1]
