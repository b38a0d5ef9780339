"""What the plan counts for the distillation loss against what its forward pass allocates on fake tensors of a GPU."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.teacher import Teacher
from tightfit.jobs.workload import Workload
from tightfit.kernels.loss import linear_distillation as loss
from tightfit.kernels.loss import logit_chunks, split_sum
from tightfit.memory.allocator import PlainAllocator
from tightfit.memory.formulas.rank import RankMemory
from tightfit.memory.simulation import simulated
from tightfit.models.presets import preset

STEM = "llama-3.2-1b"
SMALL_BYTES = 2**15
"""Losses of a chunk's rows, their sum and scales."""


@pytest.fixture
def launching_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are not launched, and fake tensors, which are on the CPU, take the ways of a GPU's."""
    monkeypatch.setattr(FakeTensor, "is_cuda", True, raising=False)
    launcher = type("Launcher", (), {"__getitem__": lambda self, grid: lambda *_, **__: None})()
    monkeypatch.setattr(split_sum, "split_add_kernel", launcher)
    monkeypatch.setattr(loss, "read_pair_rows", lambda *_: None)
    monkeypatch.setattr(loss, "on_device_of", nullcontext)
    monkeypatch.setattr(split_sum, "on_device_of", nullcontext)
    # Few rows are multiplied in float32 (`write_product`), which no formula counts: 8 MiB at most, 132 tiles of it.
    monkeypatch.setattr(logit_chunks, "multiprocessors", lambda device: 1)


def traced_bytes(tokens: int, width: int, vocabulary: int, chunk_bytes: int, dtype: torch.dtype) -> int:
    """The most that the forward pass of the loss holds beside its inputs."""
    with simulated() as tracer:
        hidden, weight = (torch.empty(n, width, dtype=dtype) for n in (tokens, vocabulary))
        labels = torch.empty(tokens, dtype=torch.long)
        divisor = torch.ones(())
        inputs_bytes = tracer.trace.replay(PlainAllocator()).allocated_bytes[-1]
        chunks = loss._chunks(hidden, weight, tokens, chunk_bytes, triton=True)
        ctx: Any = SimpleNamespace(needs_input_grad=(True, True), save_for_backward=lambda *_: None)
        parts = (hidden, weight, hidden, weight, labels, loss.DistillationTerms(), chunks, divisor, True)
        loss._LinearDistillation.forward(ctx, *parts)
        return tracer.trace.replay(PlainAllocator()).peak_allocated_bytes - inputs_bytes


@pytest.mark.parametrize(("tokens", "chunk_bytes"), [(8192, 2**28), (32768, 2**28), (512, 2**28), (8192, 2**20)])
@pytest.mark.parametrize("precision", ["pure-bf16", "fp32"])
@pytest.mark.usefixtures("launching_nothing")
def test_the_loss_holds_what_is_counted(tokens: int, chunk_bytes: int, precision: Any) -> None:
    spec = preset(STEM)
    teacher = Teacher(spec=spec, weight_bytes=0)
    asked = Workload(spec=spec, sequence_length=tokens, global_batch=1, precision=precision, teacher=teacher)
    rank = RankMemory(asked, Layout(micro_batch=1), Levers(loss_chunk_bytes=chunk_bytes), 0)
    dtype = torch.bfloat16 if precision == "pure-bf16" else torch.float32
    counted = rank.teacher.chunk + rank.loss.wide_weight_gradient + rank.shape.hidden_bytes
    held = traced_bytes(tokens, spec.hidden_size, spec.vocab_size, chunk_bytes, dtype)
    assert counted <= held <= counted + SMALL_BYTES
