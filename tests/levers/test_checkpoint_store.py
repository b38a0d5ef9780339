"""Offloaded checkpoints: which go, when they come back, how often buffers are made, and what fp8 loses."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.train.models import TINY, ragged_batch, tiny_model
from tightfit.errors import UserError
from tightfit.jobs.levers import Levers
from tightfit.levers import checkpoint_store
from tightfit.levers.checkpoint_format import restored, stored
from tightfit.levers.checkpoint_store import HostStore, InputOnHost
from tightfit.levers.checkpointing import Checkpointing, checkpoint_layers
from tightfit.levers.policy.offload import offloaded_count, stored_bytes
from tightfit.memory.host import watched
from tightfit.models.decoder import Decoder
from tightfit.train.step import accumulate

CPU = torch.device("cpu")
SPEC = replace(TINY, layers=4)
INPUT_BYTES = 4 * 16 * 32 * 4


def offloading(**levers: Any) -> tuple[Decoder, HostStore]:
    model = tiny_model(SPEC)
    checkpoint_layers(model, Levers(checkpoint_every=1, offload_checkpoints=True, **levers))
    forward: Any = model.layers[0].forward
    checkpointing = forward.func.__self__
    assert isinstance(checkpointing, Checkpointing)
    assert checkpointing.store is not None
    return model, checkpointing.store


@pytest.mark.parametrize(
    ("host_bytes", "expected"), [(None, 3), (2 * INPUT_BYTES, 2), (INPUT_BYTES - 1, 0), (2**40, 3)]
)
def test_the_first_ones_go_within_the_hosts_bytes(host_bytes: int | None, expected: int) -> None:
    model, store = offloading(checkpoint_host_bytes=host_bytes)
    made: list[int] = []
    with watched(lambda tensor, component, detail, *, host: made.append(tensor.nbytes) if host else None):
        accumulate(model, [ragged_batch(4)] * 2, CPU)
    assert made == [INPUT_BYTES] * expected == [INPUT_BYTES] * store.allocated
    assert offloaded_count(4, INPUT_BYTES, host_bytes) == expected


def test_buffers_are_made_once_whatever_the_steps() -> None:
    model, store = offloading()
    for step in range(3):
        accumulate(model, [ragged_batch(4, seed=step)] * 2, CPU)
        assert store.allocated == 3
        assert [len(parts) for parts in store.free.values()] == [3], "all are given back after backward"


def test_a_forward_without_backward_gives_its_buffers_back() -> None:
    model, store = offloading()
    batch = ragged_batch(4)
    output = model(batch["tokens"], batch["labels"])
    assert [len(parts) for parts in store.free.values()] == [0]
    del output
    gc.collect()
    assert [len(parts) for parts in store.free.values()] == [3]


def test_two_forwards_in_flight_have_buffers_each() -> None:
    """As pipelines have them: the first one's backward comes after the second one's forward."""
    model, store = offloading()
    batches = [ragged_batch(4, seed=seed) for seed in range(2)]
    losses = [model(batch["tokens"], batch["labels"]).loss for batch in batches]
    assert store.allocated == 6
    for loss in losses:
        loss.backward()
    other = tiny_model(SPEC)
    for batch in batches:
        other(batch["tokens"], batch["labels"]).loss.backward()
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad), name


def test_each_comes_while_the_one_after_it_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = offloading()
    order: list[str] = []
    copy_to_gpu, fetch = HostStore.copy_to_gpu, InputOnHost.fetch

    def noted_copy(self: HostStore, *arguments: Any) -> Any:
        order.append("copy_to_gpu")
        return copy_to_gpu(self, *arguments)

    def noted_fetch(self: InputOnHost) -> Any:
        order.append("fetch")
        return fetch(self)

    monkeypatch.setattr(HostStore, "copy_to_gpu", noted_copy)
    monkeypatch.setattr(InputOnHost, "fetch", noted_fetch)
    accumulate(model, [ragged_batch(4)], CPU)
    assert order == ["copy_to_gpu", "fetch", "copy_to_gpu", "fetch", "copy_to_gpu", "fetch"], (
        "the first with the last layer, which stays"
    )


def test_no_input_stays_where_it_was() -> None:
    """What the host has is a copy; the layer's own input is freed when the next layer runs."""
    model, _ = offloading()
    seen: list[weakref.ref[Any]] = []
    alive: list[int] = []
    for layer in model.layers:

        def look(_: Any, given: Any) -> None:
            seen.append(weakref.ref(given[0].untyped_storage()))
            alive.append(sum(each() is not None for each in seen))

        layer.attention_norm.register_forward_pre_hook(look)
    batch = ragged_batch(4)
    output = model(batch["tokens"], batch["labels"])
    assert alive == [1] * 4
    assert sum(each() is not None for each in seen) == 1, "the last one stays"
    assert output.loss is not None


def test_more_than_the_host_has_is_refused_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model, store = offloading()
    monkeypatch.setattr(checkpoint_store, "free_host_bytes", lambda: 3 * INPUT_BYTES - 1)
    with pytest.raises(UserError, match=r"needs 3 times .* GiB are free; set levers.checkpoint_host_bytes below that"):
        accumulate(model, [ragged_batch(4)], CPU)
    assert store.allocated == 0
    monkeypatch.setattr(checkpoint_store, "free_host_bytes", lambda: 3 * INPUT_BYTES)
    accumulate(model, [ragged_batch(4)], CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 5, 48), (1, 1, 7)])
def test_fp8_is_within_half_a_step_of_three_bits(
    dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tightfit.levers.checkpoint_format.ROWS_BYTES", 4 * 48 * 3)
    x = (torch.randn(shape) * torch.logspace(-3, 3, shape[-1])).to(dtype)
    x[0, 0] = 0
    parts = stored(x, "fp8")
    assert sum(part.nbytes for part in parts) == stored_bytes(x.numel() // shape[-1], shape[-1], 4, "fp8")
    back = restored(parts, x.shape, dtype)
    assert back.shape == x.shape
    assert back.dtype == dtype
    largest = x.float().abs().amax(-1, keepdim=True)
    half_step = torch.maximum(x.float().abs() / 16, largest / 448 * 2**-10)  # below 2^-6 steps are all alike
    rounding = x.float().abs() * (2**-8 if dtype == torch.bfloat16 else 1e-6)
    assert bool(((back.float() - x.float()).abs() <= half_step + rounding).all())
    assert not torch.equal(back, x) or shape == (1, 1, 7)
    assert bool((back[0, 0] == 0).all())


def test_fp8_changes_gradients_a_little_and_the_loss_not_at_all() -> None:
    model, _ = offloading(checkpoint_format="fp8")
    other = tiny_model(SPEC)
    losses = [accumulate(each, [ragged_batch(4)], CPU)[0] for each in (model, other)]
    assert torch.equal(*losses)
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        error = float((a.grad - b.grad).norm() / b.grad.norm())
        assert error < 0.1, name
        if "layers.0" in name:
            assert error > 0, name
