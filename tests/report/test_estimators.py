"""Other programs' estimates: their own figures for questions whose answers are known."""

import pytest

from tests.plan.questions import planned
from tightfit.report.estimators import Estimate, estimates


def by_name(*asked: str, rows: int = 8) -> dict[str, Estimate]:
    model, on, *pins = asked
    return {each.who: each for each in estimates(planned(model, on, 512, rows, *pins).plan)}


def test_accelerate_counts_the_whole_model_on_one_gpu() -> None:
    found = by_name("llama-3.1-8b", "8xV100-32GB")
    told = found["accelerate"].gpu_bytes
    assert told is not None
    assert told == 8_030_261_248 * 4 * 2  # two float32 states a parameter; gradients come to less
    ours = found["tightfit"].gpu_bytes
    assert ours is not None
    assert ours < told


def test_deepspeed_says_what_people_were_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """8B: 18.78 GB a GPU on eight without offload, 5.70 on four with the optimizer on the host."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed", reason="pip install --no-build-isolation deepspeed")
    eight = by_name("llama-3.1-8b", "8xV100-32GB", "layout.data=8", "layout.zero=3", "levers.offload=none")
    four = by_name("llama-3.1-8b", "4xV100-32GB", "layout.data=4", "layout.zero=3", "levers.offload=optimizer")
    assert (eight["DeepSpeed"].gpu_bytes or 0) / 2**30 == pytest.approx(18.78, abs=0.02)
    assert (four["DeepSpeed"].gpu_bytes or 0) / 2**30 == pytest.approx(5.70, abs=0.02)
    assert (four["tightfit"].gpu_bytes or 0) > (four["DeepSpeed"].gpu_bytes or 0)


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in ("deepspeed.runtime.zero.stage3", "accelerate.commands.estimate"):
        monkeypatch.setitem(sys.modules, name, None)
    found = by_name("llama-3.1-8b", "8xV100-32GB")
    for who in ("DeepSpeed", "accelerate"):
        assert found[who].gpu_bytes is None
        assert "not installed: pip install" in found[who].note
