"""Which device and precision a job gets."""

from pathlib import Path

import pytest
import torch

from tightfit.errors import UserError
from tightfit.hardware.cpu import has_native_bf16, peak_resident_bytes
from tightfit.train import precision
from tightfit.train.precision import choose_device, choose_precision


@pytest.mark.parametrize(
    ("line", "native"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 amx_bf16", True),
        ("flags\t\t: fpu avx2 fma", False),
        ("Features\t: fp asimd bf16 i8mm", True),
        ("Features\t: fp asimd asimddp", False),
        ("", False),
    ],
)
def test_native_bf16_is_read_from_the_kernel(tmp_path: Path, line: str, native: bool) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{line}\n")
    assert has_native_bf16(cpuinfo) is native
    assert has_native_bf16(tmp_path / "none") is False


@pytest.mark.parametrize(
    ("native", "bf16_seconds", "expected"), [(True, 0.5, "bf16"), (True, 0.95, "fp32"), (False, 0.5, "fp32")]
)
def test_auto_precision_on_cpus(
    monkeypatch: pytest.MonkeyPatch, native: bool, bf16_seconds: float, expected: str
) -> None:
    """bf16 where it is native and clearly faster than float32, which takes a second here."""
    monkeypatch.setattr(precision, "has_native_bf16", lambda: native)
    monkeypatch.setattr(precision, "product_seconds", lambda dtype: 1.0 if dtype == torch.float32 else bf16_seconds)
    precision.faster_on_cpu.cache_clear()
    assert choose_precision("auto", torch.device("cpu")) == expected
    precision.faster_on_cpu.cache_clear()
    assert choose_precision("fp16", torch.device("cpu")) == "fp16"


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="device=cpu"):
        choose_device("cuda")
    assert choose_device("auto").type == "cpu"


def test_peak_memory_is_plausible() -> None:
    held = bytearray(200 * 2**20)
    assert 200 * 2**20 < peak_resident_bytes() < 2**40
    assert len(held) == 200 * 2**20
