"""LoRA adapters mixed in one step: every token's projections are changed by the adapter of its request.

For an adapter with tokens in the step, rows of a projection's output get B (A x) of the same rows of its input. Steps
without such tokens run as they would without adapters; others run through the decoder's own layers, whose projections
get a hook for the length of the step. A loop over adapters: right for a few at a time, not for hundreds.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tightfit.errors import UserError
from tightfit.models.decoder import Decoder
from tightfit.models.huggingface.adapter import Adapter, load_adapter
from tightfit.models.spec import ModelSpec

Rows = Mapping[str, Tensor]
"""Indices of the rows of a step, by the name of the adapter they use."""


def load_adapters(wanted: Mapping[str, Path], model: Decoder) -> dict[str, Adapter]:
    """The adapters in these directories, by the name that clients ask for."""
    return {name: load_adapter(path, model) for name, path in wanted.items()}


def refuse_folded(adapters: Mapping[str, Adapter], spec: ModelSpec) -> None:
    """Refuse adapters of `kv_b`: latent attention multiplies these weights into its queries, for all requests alike."""
    for name, adapter in adapters.items():
        if spec.latent is not None and any(changed.endswith(".kv_b") for changed in adapter.changes):
            raise UserError(
                f"adapter {name!r} changes kv_b_proj, which latent attention is served without; merge it with peft "
                "(`merge_and_unload`) and serve that"
            )


class AdapterSet:
    """The adapters of one model, by name."""

    def __init__(self, model: Decoder, adapters: Mapping[str, Adapter]) -> None:
        self.adapters = adapters
        touched = sorted({name for adapter in adapters.values() for name in adapter.changes})
        self._modules: dict[str, nn.Module] = {name: model.get_submodule(name) for name in touched}

    @contextmanager
    def applied(self, rows: Rows) -> Iterator[None]:
        """Until the block is left, tokens in `rows` are changed by their adapters."""
        used = {name for adapter in rows for name in self.adapters[adapter].changes}
        hooks = [self._modules[name].register_forward_hook(self._hook(name, rows)) for name in used]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, name: str, rows: Rows) -> Callable[..., Any]:
        changes = {adapter: self.adapters[adapter].changes for adapter in rows}
        own = [(rows[adapter], change[name]) for adapter, change in changes.items() if name in change]
        return partial(_add, own)


def _add(own: list[Any], _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """The output [1, N, out] of a projection, with B (A x) added at the rows of each adapter."""
    x, y = inputs[0].reshape(-1, inputs[0].shape[-1]), output.reshape(-1, output.shape[-1])
    for rows, change in own:
        y.index_add_(0, rows, x[rows] @ change.down.T @ change.up.T)
    return y.view_as(output)
