"""Requests to stop: what is saved first, and how a run that stopped compares with its plan."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tightfit.errors import UserError
from tightfit.jobs.job import Job
from tightfit.models.decoder import Decoder
from tightfit.models.resolve import resolve_spec
from tightfit.plan.mfu import token_flops
from tightfit.train import loop, stopping
from tightfit.train.data.loader import evaluation_batches
from tightfit.train.loop import run_job
from tightfit.train.metrics import read_metrics
from tightfit.train.pace import Pace, peak_flops
from tightfit.train.step import NotFiniteError, train_step
from tightfit.train.stopping import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_who_asks_during_an_evaluation_gets_a_checkpoint_and_no_evaluation(
    make_small: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Evaluations may take minutes, and who asked may kill after seconds."""
    taken: list[int] = []

    def slow(*given: Any, **named: Any) -> Iterator[Any]:
        is_second = bool(taken)
        for batch in evaluation_batches(*given, **named):
            taken.append(1)
            if is_second:
                assert (job.output / "checkpoints" / "step-00000001").is_dir(), "saved before it is evaluated"
                os.kill(os.getpid(), number)
            yield batch

    monkeypatch.setattr(loop, "evaluation_batches", slow)
    job = make_small(steps=9, evaluation={"every": 1, "max_rows": 64}, saving={"every": 1}, layout={"micro_batch": 1})
    before = signal.signal(number, signal.SIG_DFL)  # the tests themselves may run under nohup
    try:
        result = run_job(job, quiet=True)
    finally:
        signal.signal(number, before)
    assert (result.stopped_by, result.step, result.end) == (number, 1, None)
    whole = sum("held_out_loss" in row for row in read_metrics(job.output / "metrics.jsonl"))
    assert whole == 1, "that of the beginning"
    assert run_job(job, resume=True, stop_after=1, quiet=True).step == 1


def test_who_asks_twice_is_told_what_was_saved(
    make_small: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The second request comes in the middle of the third step, which is given up; the run goes on from the second."""
    job = make_small(steps=9, saving={"every": 1}, evaluation={"max_rows": 1})
    monkeypatch.setattr(stopping, "SAME_REQUEST_S", 0.0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def asked_for_twice(module: Any, optimizer: Any, *given: Any, **named: Any) -> Any:
        if (job.output / "checkpoints" / "step-00000002").is_dir():
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
        return train_step(module, optimizer, *given, **named)

    monkeypatch.setattr(loop, "train_step", asked_for_twice)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_job(job)
    finally:
        signal.signal(signal.SIGINT, before)
    said = " ".join(capfd.readouterr().err.split())
    assert "SIGINT: finishing the step and saving; once more stops at once" in said
    assert f"SIGINT again: stopping at once; the last good checkpoint is {job.output}/checkpoints/step-00000002" in said
    monkeypatch.setattr(loop, "train_step", train_step)
    assert run_job(job, resume=True, stop_after=3, quiet=True).step == 3


def test_a_signal_that_was_ignored_stays_ignored() -> None:
    """As under nohup."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        request = StopRequest(lambda _: None, str)
        with request.heard():
            signal.raise_signal(signal.SIGHUP)
        assert request.signal is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_a_loss_that_is_not_finite_says_what_helps(
    make_small: Callable[..., Job], run_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise NotFiniteError("the loss is nan")

    monkeypatch.setattr(loop, "train_step", fail)
    with pytest.raises(UserError, match=r"the same settings would come to the same step: go on with --resume -o opt"):
        run_job(make_small(steps=4), resume=True, quiet=True)
    with pytest.raises(UserError, match=r"go on with -o optimizer\.lr=0\.0025, from the beginning, or a longer"):
        run_job(make_small("other"), quiet=True)


def test_the_pace_is_that_of_steady_steps() -> None:
    """Two slow ones at the beginning, and one later, which is no warm-up."""
    pace = Pace()
    for seconds in (30.0, 4.0, 1.0, 1.1, 0.9, 5.0, 1.0, 1.0):
        pace.add(100, seconds)
    assert (pace.warmup_steps, pace.warmup_seconds, pace.seconds) == (2, 34.0, 44.0)
    assert pace.tokens_per_second == pytest.approx(600 / 10)
    assert Pace().tokens_per_second == 0.0


def test_model_flops_against_the_products_of_a_step() -> None:
    """Counted by torch over forward and backward of the real decoder, whose attention it counts in full."""
    spec, length = resolve_spec("tiny-llama"), 64
    model = Decoder(spec)
    tokens = torch.randint(0, spec.vocab_size, (1, length))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        logits = model(tokens).logits
        assert logits is not None
        logits.sum().backward()
    attention = 6 * spec.layers * spec.heads * spec.head_dim * length  # causal: half of what is counted
    norms = 6 * (2 * spec.layers + 1) * spec.hidden_size
    expected = (token_flops(spec, length) + attention - norms) * length
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.04)


def test_windows_see_fewer_pairs() -> None:
    """Counted one by one: position i sees the last `window` of i + 1 positions."""
    spec, length = resolve_spec("gemma-2-2b"), 8192
    assert spec.window is not None
    windowed, layers = len(spec.window_layers), spec.layers
    seen = sum(min(i + 1, spec.window) for i in range(length)) * windowed + length**2 / 2 * (layers - windowed)
    more = token_flops(spec, length) - token_flops(spec, 1)
    assert more == pytest.approx(12 * spec.query_size * seen / length, rel=1e-3)


def test_the_peak_of_known_cards() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", 81_559 * 2**20, "bf16") == 989.4e12
    assert peak_flops("NVIDIA H100 80GB HBM3", 81_559 * 2**20, "pure-bf16") == 989.4e12
    assert peak_flops("Tesla V100-SXM2-32GB", 32_510 * 2**20, "bf16") is None
    assert peak_flops("CPU, 4 threads", 2**34, "bf16") is None
