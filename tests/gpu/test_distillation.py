"""Distillation on a GPU: exact in bf16, no more memory than a chunk, and a teacher that stays on the host."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.truth import assert_no_worse
from tightfit.jobs.distill import Distill
from tightfit.kernels.loss.linear_distillation import (
    DIVERGENCES,
    DistillationTerms,
    linear_distillation,
    linear_distillation_eager,
)
from tightfit.levers.policy.loss_chunks import SPLIT_PRODUCT_BYTES, distillation_chunks
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.presets import preset
from tightfit.train.distillation import Distiller, HostedTeacher

CUDA = torch.device("cuda")


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("vocab", [4096, 4999])
@pytest.mark.parametrize(("chunk_bytes", "sum_bytes"), [(2**20, 4), (2**22, 3)])
def test_no_less_exact_than_eager(divergence: str, vocab: int, chunk_bytes: int, sum_bytes: int) -> None:
    """With float32 sums over many chunks, and with sums in 24 bits over few."""
    assert distillation_chunks(1500, vocab, 256, 2, chunk_bytes, narrow=True).sum_bytes == sum_bytes
    torch.manual_seed(0)
    hidden, taught = torch.randn(1500, 256, device=CUDA).bfloat16(), torch.randn(1500, 384, device=CUDA).bfloat16()
    weight, teacher = (torch.randn(vocab, size, device=CUDA).bfloat16() / 16 for size in (256, 384))
    labels = torch.randint(0, vocab, (1500,), device=CUDA)
    labels[::3] = -100
    terms = DistillationTerms(divergence=divergence)  # type: ignore[arg-type]

    def run(fused: bool, dtype: torch.dtype) -> list[torch.Tensor]:
        h, w = (x.to(dtype).requires_grad_() for x in (hidden, weight))
        g, t = taught.to(dtype), teacher.to(dtype)
        if fused:
            loss = linear_distillation(h, w, g, t, labels, terms, divisor=1000.0, chunk_bytes=chunk_bytes)
        else:
            loss = linear_distillation_eager(h, w, g, t, labels, terms).sum() / 1000
        return [loss, *torch.autograd.grad(loss, (h, w))]

    assert_no_worse(run(True, torch.bfloat16), run(False, torch.bfloat16), run(False, torch.float64))


def test_holds_chunks_of_logits_only() -> None:
    N, H, V, chunk_bytes = 8192, 512, 32000, 64 * 2**20
    hidden = torch.randn(N, H, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(V, H, device=CUDA, dtype=torch.bfloat16) / 23).requires_grad_()
    labels = torch.randint(0, V, (N,), device=CUDA)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = linear_distillation(
        hidden, weight, hidden.detach(), weight.detach(), labels, DistillationTerms(), chunk_bytes=chunk_bytes
    )
    peak = torch.cuda.max_memory_allocated() - before
    sums_bytes, hidden_bytes = 3 * V * H, 2 * N * H
    assert peak < chunk_bytes + SPLIT_PRODUCT_BYTES + sums_bytes + hidden_bytes + 8 * 2**20
    loss.backward()
    assert torch.cuda.max_memory_allocated() - before == peak, "backward needs no more: the gradient is part of the sum"


def test_a_teacher_on_the_host_teaches_the_same() -> None:
    torch.manual_seed(0)
    spec = replace(preset("tiny-llama"), vocab_size=512)
    student, teacher = (Decoder(spec) for _ in range(2))
    init_weights(student)
    init_weights(teacher)
    student.to(CUDA, torch.bfloat16)
    teacher.to(torch.bfloat16)
    tokens = torch.randint(0, 512, (2, 64), device=CUDA)
    losses = []
    for place in ("cpu", "cuda"):
        hosted = HostedTeacher(teacher.to(place), CUDA)
        student.objective = Distiller(student, hosted, Distill(teacher="t"))
        loss = student(tokens, tokens.roll(-1, 1)).loss
        loss.backward()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
