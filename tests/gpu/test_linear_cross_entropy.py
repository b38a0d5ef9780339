"""Linear cross entropy on a GPU: what it holds in memory, and that no chunk size or vocabulary slips through."""

from typing import Any

import pytest
import torch

from tests.kernels.truth import assert_no_worse
from tightfit.kernels.loss.linear_cross_entropy import linear_cross_entropy

CUDA = torch.device("cuda")


@pytest.mark.parametrize("vocab", [4096, 4999])
@pytest.mark.parametrize("chunk_bytes", [0, 2**20, 2**26])
def test_no_less_exact_than_eager(chunk_bytes: int, vocab: int) -> None:
    torch.manual_seed(0)
    hidden, weight = (
        torch.randn(1500, 256, device=CUDA).bfloat16(),
        torch.randn(vocab, 256, device=CUDA).bfloat16() / 16,
    )
    labels = torch.randint(0, vocab, (1500,), device=CUDA)
    labels[::3] = -100

    def run(impl: str, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
        options: dict[str, Any] = {"reduction": "mean", "chunk_bytes": chunk_bytes, "impl": impl}
        loss = linear_cross_entropy(leaves[0], leaves[1], labels, **options)
        return [loss, *torch.autograd.grad(loss, leaves)]

    assert_no_worse(run("triton", torch.bfloat16), run("eager", torch.bfloat16), run("eager", torch.float64))


def test_holds_no_more_than_the_float32_sum_beside_its_gradients() -> None:
    N, H, V = 4096, 512, 32000
    hidden = torch.randn(N, H, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(V, H, device=CUDA, dtype=torch.bfloat16) / 23).requires_grad_()
    labels = torch.randint(0, V, (N,), device=CUDA)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(hidden, weight, labels, chunk_bytes=0).backward()
    held = torch.cuda.max_memory_allocated() - before
    assert held < 4 * V * H + 2 * V * H + 2 * N * H + 2**22
