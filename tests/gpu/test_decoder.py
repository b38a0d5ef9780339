"""Every family on the GPU against the CPU, and the training path in the formats GPUs train in."""

from pathlib import Path

import pytest
import torch

from tests.train.jobs import tiny_job
from tightfit.kernels.attention.attention import AttentionMask, attention
from tightfit.kernels.loss.linear_cross_entropy import linear_cross_entropy
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.presets import preset_names
from tightfit.models.resolve import resolve_spec
from tightfit.train.loop import run_job

TINY = [name for name in preset_names() if name.startswith("tiny-")]
CUDA = torch.device("cuda")


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """‖found − truth‖ / ‖truth‖ in float64."""
    found, truth = found.double().cpu(), truth.double().cpu()
    return ((found - truth).norm() / truth.norm()).item()


def worst(found: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    """The largest error of any gradient; those that are zero but for rounding (a key's bias) count by all's size."""
    whole = max(gradient.double().norm().item() for gradient in truth)
    distances = [(a.double().cpu() - b.double()).norm().item() for a, b in zip(found, truth, strict=True)]
    return max(d / max(b.double().norm().item(), 1e-3 * whole) for d, b in zip(distances, truth, strict=True))


def gradients(
    model: Decoder, tokens: torch.Tensor, labels: torch.Tensor, documents: torch.Tensor
) -> list[torch.Tensor]:
    output = model(tokens, labels, documents=documents)
    assert output.loss is not None
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return list(torch.autograd.grad(output.loss, trained))


@pytest.mark.parametrize("name", TINY)
def test_gpu_equals_cpu_and_bf16_is_as_close_as_bf16_can_be(name: str) -> None:
    torch.manual_seed(0)
    spec = resolve_spec(name)
    model = Decoder(spec)
    init_weights(model)
    tokens = torch.randint(0, spec.vocab_size, (2, 48))
    labels = torch.randint(0, spec.vocab_size, (2, 48))
    documents = (torch.arange(48)[None] >= 20).int().expand(2, -1)
    truth = gradients(model, tokens, labels, documents)
    model, tokens, labels, documents = model.to(CUDA), tokens.to(CUDA), labels.to(CUDA), documents.to(CUDA)
    wide = gradients(model, tokens, labels, documents)
    assert worst(wide, truth) < 1e-4
    narrow = gradients(model.to(torch.bfloat16), tokens, labels, documents)
    assert all(gradient.isfinite().all() for gradient in narrow)
    if spec.experts is None:  # a router's choice may flip in bf16, which is a different function
        assert worst(narrow, truth) < 0.1


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_cross_entropy_is_no_less_exact_than_eager(dtype: torch.dtype, softcap: float | None) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(1000, 257, device=CUDA, dtype=dtype)
    weight = torch.randn(3001, 257, device=CUDA, dtype=dtype) * 0.1
    labels = torch.randint(0, 3001, (1000,), device=CUDA)
    labels[::7] = -100

    def run(impl: str, to: torch.dtype) -> tuple[torch.Tensor, ...]:
        h, w = hidden.detach().to(to).requires_grad_(), weight.detach().to(to).requires_grad_()
        loss = linear_cross_entropy(h, w, labels, softcap=softcap, chunk_bytes=4 * 3001 * 130, impl=impl)  # type: ignore[arg-type]
        return (loss, *torch.autograd.grad(loss, (h, w)))

    truth, eager, ours = run("eager", torch.float64), run("eager", dtype), run("auto", dtype)
    for exact, reference, found in zip(truth, eager, ours, strict=True):
        assert error(found, exact) <= 1.05 * error(reference, exact) + 1e-6


@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_backends_agree(window: int | None, packed: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 100, 64, device=CUDA, dtype=torch.bfloat16) for heads in (8, 2, 2))
    documents = (torch.arange(100, device=CUDA)[None] // 37).int().expand(2, -1) if packed else None
    mask = AttentionMask(100, 100, CUDA, documents)
    truth = attention(q.double(), k.double(), v.double(), mask, scale=0.125, window=window, impl="eager")
    errors = [
        error(attention(q, k, v, mask, scale=0.125, window=window, impl=impl), truth) for impl in ("sdpa", "eager")
    ]
    assert errors[0] <= 1.1 * errors[1] + 1e-3


@pytest.mark.parametrize("precision", ["auto", "fp16", "pure-bf16", "fp32"])
def test_a_whole_run_learns(precision: str, tmp_path: Path, corpus: Path, token_cache: Path) -> None:
    job = tiny_job(tmp_path / "run", corpus, token_cache, steps=40, precision=precision, device="cuda")
    torch.empty(2**32, dtype=torch.uint8, device="cuda")  # an earlier peak of this process is none of this run's
    others = torch.cuda.memory_allocated()  # what other tests of this process still hold, and may let go of
    result = run_job(job, quiet=True)
    assert result.start is not None
    assert result.end is not None
    assert result.end.loss < result.start.loss - 1.5
    assert result.precision == ("bf16" if precision == "auto" else precision)
    assert 0 < result.peak_bytes < others + 2**30
    again = run_job(job.model_copy(update={"steps": 45}), resume=True, quiet=True)
    assert again.step == 45
