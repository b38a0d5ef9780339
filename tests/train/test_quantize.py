"""Training with rounded weights: gradients as the formulas say, runs that resume, files that hold what was trained."""

import shlex
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.covering import thorough
from tests.train.jobs import checkpoint_files
from tightfit.errors import UserError
from tightfit.jobs.job import Job
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.quantize import Quantize
from tightfit.jobs.workload import Workload
from tightfit.levers.fake_quantize import RoundedLinear, coded_weights, round_weights, trained_scheme, whole_linears
from tightfit.memory.formulas.training import training_ledger
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.loading import load_model
from tightfit.models.presets import preset
from tightfit.models.resolve import checkpoints_of
from tightfit.plan.plan import _from_json
from tightfit.report.next_commands import next_commands
from tightfit.train import loop
from tightfit.train.evaluation import Evaluation
from tightfit.train.loop import run_job

LEARNED = {"bits": 3, "group": 16}


def straight_through(weight: Tensor, log_scale: Tensor, bits: int, group: int) -> Tensor:
    """LSQ written with detached differences instead of a function of its own."""
    scale = log_scale.exp()
    stored = (scale + (scale.half().float() - scale).detach())[..., None]
    ratio = weight.view(weight.shape[0], -1, group) / stored
    half = 2 ** (bits - 1)
    clamped = ratio.clamp(-half, half - 1)
    return ((clamped + (clamped.round() - clamped).detach()) * stored).view(weight.shape)


def test_gradients_are_lsqs() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(32, 8, bias=False), torch.randn(5, 32)
    scheme = trained_scheme(Quantize(bits=3, group=16))
    log_scale = nn.Parameter(linear.weight.detach().abs().view(8, 2, 16).mean(-1).mul(0.6).log())
    wanted = straight_through(linear.weight, log_scale, 3, 16)
    (x @ wanted.T).square().sum().backward()
    assert linear.weight.grad is not None
    assert log_scale.grad is not None
    of_weight, of_scale = linear.weight.grad.clone(), log_scale.grad.clone()
    linear.weight.grad = log_scale.grad = None
    made = RoundedLinear(linear, scheme, log_scale, "plain")(x)
    torch.testing.assert_close(made, x @ wanted.T)
    made.square().sum().backward()
    torch.testing.assert_close(linear.weight.grad, of_weight)
    torch.testing.assert_close(log_scale.grad, of_scale * (16 * 3) ** -0.5)


@pytest.mark.parametrize("settings", [{"bits": 2, "scales": "minmax"}, {"bits": 1}, {"bits": 4, "outputs": "int8"}])
def test_what_is_computed_is_what_codes_hold(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Decoder(replace(preset("tiny-llama"), vocab_size=96, layers=1))
    init_weights(model)
    chosen = Quantize(group=16, **settings)
    learned = round_weights(model, chosen)
    assert bool(learned) == (chosen.scales == "learned")
    linear, codes = dict(whole_linears(model))["layers.0.mlp.down"], coded_weights(model)["layers.0.mlp.down.weight"]
    x = torch.randn(3, linear.in_features)
    wanted = x @ codes.dequantize().T
    assert len(codes.codes.unique()) <= codes.scheme.levels
    step = wanted.abs().amax(-1, keepdim=True) / 127 if chosen.outputs == "int8" else 0.0
    assert bool(((linear(x) - wanted).abs() <= step / 2 + 1e-5).all())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: Path, token_cache: Path) -> Callable[..., Job]:
    from tests.train.jobs import SMALL_RUN, tiny_job

    folder = tmp_path_factory.mktemp("qat")

    def job(name: str, **changes: Any) -> Job:
        saving = {"every": 2, "keep": 3, "sharded": False}
        fields = {**SMALL_RUN, "steps": 4, "quantize": LEARNED, "saving": saving, **changes}
        return tiny_job(folder / name, corpus, token_cache, **fields)

    return job


def test_a_run_resumes_bit_for_bit_and_ends_in_a_compressed_model(trained: Callable[..., Job]) -> None:
    whole = run_job(trained("whole"), quiet=True)
    parts = trained("parts")
    run_job(parts, stop_after=2, quiet=True)
    assert not (parts.output / "quantized").exists()
    run_job(parts, resume=True, quiet=True)
    assert checkpoint_files(checkpoints_of(parts.output)[-1]) == checkpoint_files(checkpoints_of(whole.run)[-1])
    small = load_model(str(whole.run / "quantized"))
    latent = load_model(str(whole.checkpoint)).model
    assert small.tokenizer is not None
    assert not torch.equal(small.model(torch.arange(9)[None]).logits, latent(torch.arange(9)[None]).logits)
    one, other = (
        load_model(str(run / "quantized")).model(torch.arange(9)[None]).logits for run in (whole.run, parts.output)
    )
    assert torch.equal(one, other)


@pytest.mark.parametrize("now", [{"bits": 2, "group": 16}, {"bits": 3, "group": 32}, {}])
def test_a_run_is_resumed_with_the_rounding_it_began_with(trained: Callable[..., Job], now: dict[str, Any]) -> None:
    """Learned scales belong to a number of bits and a group size."""
    name = f"changed to {now}"
    run_job(trained(name), stop_after=2, quiet=True)
    with pytest.raises(UserError, match=r"quantize\.\w+ is .*, but .*step-00000002 was made with .*; set it back"):
        run_job(trained(name, quantize=now), resume=True, quiet=True)


def test_a_run_that_stops_early_ends_in_a_compressed_model_too(
    trained: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is over; what is named to go on with is the rounded model, as checkpoints hold weights before rounding."""
    losses = iter([3.0, 2.0, 2.5, 2.6])
    monkeypatch.setattr(loop, "evaluate", lambda *_: Evaluation(next(losses), 10))
    job = trained("plateau", steps=20, evaluation={"every": 1, "stop_early": 1})
    result = run_job(job, quiet=True)
    assert (result.step, result.stopped_early) == (2, True)
    assert load_model(str(job.output / "quantized")).tokenizer is not None
    sources = [shlex.split(command.partition("#")[0])[2] for command in next_commands(result, job)]
    assert sources == [str(job.output / "quantized")] * 3


SHOWN: dict[str, Any] = {"model": {"source": "tiny-llama"}, "steps": 20, "evaluation": {"max_rows": 8}}


@pytest.fixture(scope="module")
def plain_checkpoint(trained: Callable[..., Job]) -> Path:
    """A model trained without rounding for as many steps."""
    return run_job(trained("plain", **SHOWN, quantize={}), quiet=True).checkpoint


@pytest.mark.parametrize("bits", [thorough(2), 1])
def test_it_ends_below_rounding_afterwards(bits: int, trained: Callable[..., Job], plain_checkpoint: Path) -> None:
    """Same steps, same data: trained for few bits, the model loses less than one rounded when training is over."""
    rounded = {"bits": bits, "group": 16}
    aware = run_job(trained(f"aware-{bits}", **SHOWN, quantize=rounded), quiet=True)
    source = {"model": {"source": str(plain_checkpoint)}, "tokenizer": {"source": "model"}, "steps": 1}
    after = run_job(trained(f"after-{bits}", **{**SHOWN, **source}, quantize=rounded), quiet=True)
    assert aware.end is not None
    assert after.start is not None  # before its first step: the plain model, rounded
    assert aware.end.loss < after.start.loss - 0.02


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantize": {"group": 32}}, "no bits"),
        ({"quantize": {"bits": 7}}, "bits"),
        (
            {
                "quantize": LEARNED,
                "layout": {"micro_batch": 1, "data": 2, "zero": 2},
                "levers": {"update_in_backward": True},
            },
            "quantize.scales=minmax",
        ),
        ({"quantize": LEARNED, "levers": {"tiles": 2}}, "levers.tiles=1"),
    ],
)
def test_what_does_not_go_together(changes: dict[str, Any], said: str, trained: Callable[..., Job]) -> None:
    with pytest.raises(ValueError, match=said):
        trained("refused", **changes)


def test_groups_are_whole(trained: Callable[..., Job]) -> None:
    job = trained("groups", quantize={"bits": 3, "group": 64})
    with pytest.raises(UserError, match="no whole groups"):
        run_job(job, quiet=True)
    assert not job.output.exists()


def test_the_plan_counts_copies_and_scales() -> None:
    spec = preset("llama-3.2-1b")
    plain = Workload(spec=spec, sequence_length=1024, global_batch=1)
    rounding = Quantize(bits=3, group=64).rounding
    assert rounding is not None
    aware = replace(plain, rounding=rounding)
    layers = sum(spec.layer_params(i) for i in range(spec.layers))
    before, after = (training_ledger(w, Layout(), Levers()) for w in (plain, aware))
    assert after.peak_bytes() - before.peak_bytes() >= 2 * 0.99 * layers
    scales = {line.bytes for line in after.lines if line.detail == "learned scales"}
    assert scales == {16 * (layers // 64)}
    recomputed = Levers(checkpoint_every=1)
    less = [training_ledger(w, Layout(), recomputed).peak_bytes() for w in (plain, aware)]
    assert less[1] - less[0] < (after.peak_bytes() - before.peak_bytes()) / 2
    assert _from_json(Workload, asdict(aware)) == aware
