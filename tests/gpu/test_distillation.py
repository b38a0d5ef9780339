"""Distillation on a GPU: exact in bf16, no more memory than a chunk, and a teacher that stays on the host."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.truth import assert_no_worse, error
from tightfit.jobs.distill import Distill
from tightfit.kernels.loss.linear_distillation import (
    DIVERGENCES,
    DistillationTerms,
    linear_distillation,
    linear_distillation_eager,
)
from tightfit.levers.policy.loss_chunks import distillation_chunks
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


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("chunk_bytes", [2**20, 2**22])
def test_the_weight_gradient_is_no_less_exact_than_one_of_all_rows_at_once(divergence: str, chunk_bytes: int) -> None:
    """Sums over chunks, in float32 or in 24 bits, against the same kernels in a single chunk; the truth is float64."""
    torch.manual_seed(1)
    N, H, V = 1500, 256, 4999
    hidden, weight, taught = (torch.randn(n, H, device=CUDA).bfloat16() for n in (N, V, N))
    weight = weight / 16
    labels = torch.randint(0, V, (N,), device=CUDA)
    terms = DistillationTerms(divergence=divergence)  # type: ignore[arg-type]
    exact = weight.double().requires_grad_()
    linear_distillation_eager(hidden.double(), exact, taught.double(), weight.double(), labels, terms).sum().backward()
    assert exact.grad is not None
    errors = []
    for size in (chunk_bytes, 2**30):
        ours = weight.clone().requires_grad_()
        linear_distillation(hidden, ours, taught, weight, labels, terms, chunk_bytes=size).backward()
        assert ours.grad is not None
        errors.append(error(ours.grad, exact.grad))
    assert errors[0] <= 1.05 * errors[1]


def requested_bytes(when: str) -> int:
    """Bytes of tensors: the allocator leaves up to 1 MiB more with each large one."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{when}"])


@pytest.mark.parametrize(
    ("N", "chunk_bytes", "sum_bytes"), [(8192, 64 * 2**20, 3), (700, 64 * 2**20, 3), (8192, 4 * 2**20, 4)]
)
def test_holds_what_is_counted(N: int, chunk_bytes: int, sum_bytes: int) -> None:
    """With 24-bit sums no more in backward, whose gradient is part of the sum; float32 ones are cast there."""
    H, V = 512, 32000
    hidden = torch.randn(N, H, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(V, H, device=CUDA, dtype=torch.bfloat16) / 23).requires_grad_()
    labels = torch.randint(0, V, (N,), device=CUDA)
    chunks = distillation_chunks(N, V, H, 2, chunk_bytes, narrow=True)
    assert chunks.sum_bytes == sum_bytes
    parts = (hidden, weight, hidden.detach(), weight.detach(), labels, DistillationTerms())
    linear_distillation(*parts, chunk_bytes=chunk_bytes).backward()  # workspaces of cuBLAS, compiled kernels
    hidden.grad = weight.grad = None
    before = requested_bytes("current")
    torch.cuda.reset_peak_memory_stats()
    loss = linear_distillation(*parts, chunk_bytes=chunk_bytes)
    peak = requested_bytes("peak") - before
    hidden_bytes, wide_rows_bytes = 2 * N * H, 4 * min(N, chunks.rows) * H  # of few rows (write_product)
    counted = chunks.held_bytes + sum_bytes * V * H + hidden_bytes
    assert counted <= peak <= counted + wide_rows_bytes + 2**20
    torch.cuda.reset_peak_memory_stats()
    loss.backward()
    cast_bytes = 2 * V * H if sum_bytes == 4 else 0
    assert requested_bytes("peak") - before <= sum_bytes * V * H + 2 * hidden_bytes + cast_bytes + 2**20


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
