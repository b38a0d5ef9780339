"""Copies by a kernel: every byte of any shape and dtype, and on a GPU without waiting for the copy engines."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.kernels.truth import DEVICE
from tightfit.kernels.mapped_copy import copy_by_kernel, fetched, sent
from tightfit.levers.side_stream import HostCopy, SideStream

on_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
VALUES = (
    torch.arange(5000).view(4, 1250),
    torch.arange(12, dtype=torch.float64).view(3, 4).t(),
    torch.tensor([True, False, True]),
    torch.tensor(3.5),
    torch.empty(0, 7),
    torch.arange(2049, dtype=torch.int16),
)


@pytest.mark.parametrize("values", VALUES, ids=lambda x: f"{tuple(x.shape)} {x.dtype}")
def test_every_byte_is_copied(values: Tensor) -> None:
    source = values.contiguous().to(DEVICE)
    target = torch.full_like(source, 1)
    copy_by_kernel(source, target)
    assert torch.equal(target, source)


@on_gpu
@pytest.mark.parametrize("values", VALUES, ids=lambda x: f"{tuple(x.shape)} {x.dtype}")
def test_there_and_back(values: Tensor) -> None:
    there = sent(values, DEVICE)
    assert there.is_cuda
    assert torch.equal(there.cpu(), values)
    back = fetched(there)
    torch.cuda.synchronize()
    assert back.is_pinned() or not values.numel()
    assert torch.equal(back, values)


@on_gpu
def test_pinned_memory_is_not_given_to_others_before_it_was_read() -> None:
    size, busy = 4096, torch.randn(8192, 8192, device=DEVICE)
    for _ in range(20):
        busy = busy @ busy.t() * 1e-4
    there = [sent(torch.full((size,), number), DEVICE) for number in range(8)]
    for number, each in enumerate(there):
        assert bool((each == number).all())


@pytest.fixture
def _nothing_kept() -> Iterator[None]:
    """What a test had of the GPU is given back: others in this process watch its peaks and fill it."""
    yield
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@on_gpu
@pytest.mark.usefixtures("_nothing_kept")
def test_a_batch_and_a_loss_do_not_wait_for_the_link() -> None:
    """Gigabytes are on their way in both directions, on streams of their own, while a small copy goes each way."""
    count = 2**26
    host = [torch.empty(count, pin_memory=True) for _ in range(2)]
    gpu = [torch.zeros(count, device=DEVICE) for _ in range(2)]
    inbound, outbound = SideStream(DEVICE), SideStream(DEVICE)
    tokens = torch.arange(16_384)
    HostCopy(sent(tokens, DEVICE).sum(), beside_link=True).read()  # compiles the kernel
    torch.cuda.synchronize()
    for _ in range(16):  # a tenth of a second and more
        with inbound:
            gpu[0].copy_(host[0], non_blocking=True)
        with outbound:
            host[1].copy_(gpu[1], non_blocking=True)
    arrived, left = inbound.record_event(), outbound.record_event()
    assert HostCopy(sent(tokens, DEVICE).sum(), beside_link=True).read() == tokens.sum().item()
    assert not arrived.query()
    assert not left.query()
    torch.cuda.synchronize()
