"""FSDP2's groups: parameters that are all-gathered together, before the forward of the group's module.

Offload, which moves shards of weights and optimizer states, must tell FSDP2 where a shard lies now, and make its
all-gather wait for a shard that is still being updated. Torch has no public way to do either; all private names of
FSDP2 that we use are in this file, and are those of torch 2.11 to 2.15.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tightfit.collectives.shards import is_shard, local, replace_local


@dataclass(frozen=True)
class ShardGroup:
    """One group and its module."""

    module: nn.Module
    torch_group: Any

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Its sharded parameters."""
        return [each.sharded_param for each in self.torch_group.fsdp_params]

    def relocated(self, parameter: Tensor) -> None:
        """Make FSDP2 all-gather `parameter` from where its shard lies now."""
        self._torch_parameter(parameter).reset_sharded_param()

    def _torch_parameter(self, parameter: Tensor) -> Any:
        return next(each for each in self.torch_group.fsdp_params if each.sharded_param is parameter)

    def release(self, parameter: Tensor, dtype: torch.dtype, device: torch.device) -> None:
        """Free the memory of a parameter's shard, to which `bind` will give other memory."""
        assert is_shard(parameter)
        replace_local(parameter, torch.empty((), dtype=dtype, device=device).expand(local(parameter).shape))
        self._torch_parameter(parameter)._sharded_param_data = torch.empty(0, dtype=dtype, device=device)

    def padded_elements(self, parameter: Tensor) -> int:
        """Elements of a shard as it is all-gathered, padded to the longest of all ranks."""
        return int(self._torch_parameter(parameter).padded_sharded_param_size.numel())

    def bind(self, parameter: Tensor, memory: Tensor) -> None:
        """Make `memory`, of `padded_elements`, the shard of `parameter` that FSDP2 all-gathers from now on."""
        assert is_shard(parameter)
        torch_parameter, rows = self._torch_parameter(parameter), local(parameter).shape[0]
        replace_local(parameter, memory.view(torch_parameter.padded_sharded_param_size)[:rows])
        torch_parameter._sharded_param_data = memory

    def around_gather(self, begin: Callable[[], None], done: Callable[[], None]) -> None:
        """Call `begin` before each all-gather, and `done` when the current stream has waited for it."""
        group, gather, wait = self.torch_group, self.torch_group.unshard, self.torch_group.wait_for_unshard

        def unshard(async_op: bool = False) -> None:
            if group._all_gather_result is None and not group.is_unsharded:
                begin()
            gather(async_op)

        def wait_for_unshard() -> None:
            is_gathering = group._all_gather_result is not None
            wait()
            if is_gathering:
                done()

        group.unshard, group.wait_for_unshard = unshard, wait_for_unshard

    def widen_when_done(self) -> None:
        """Cast unsharded gradients to float32, for later micro-batches to add to, only when the whole group has them.

        Torch 2.11 to 2.14 do so. Torch 2.15 casts each as it is computed, so that in the first backward the layer at
        work and the root (the output projection) have float32 ones beside the activations of all micro-batches.
        """
        group, set_dtypes = self.torch_group, getattr(self.torch_group, "_set_unsharded_grad_dtypes", None)
        if set_dtypes is None:
            return

        def set_dtypes_later(defer_upcast: bool) -> None:
            set_dtypes(defer_upcast)  # with False, when the group is done, FSDP2 casts the existing gradients
            for each in group._fsdp_params_with_wider_grad_dtype if defer_upcast else ():
                if each.sharded_param.requires_grad:
                    each._unsharded_param.grad_dtype = None  # keep the dtype in which backward computes it

        group._set_unsharded_grad_dtypes = set_dtypes_later

    def gather_after(self, event: torch.cuda.Event | None) -> None:
        """The next all-gather begins after `event`."""
        streams = self.torch_group.comm_ctx
        if event is not None and hasattr(streams, "all_gather_stream"):  # FSDP2 makes it in the first forward pass
            streams.all_gather_copy_in_stream.wait_event(event)
            streams.all_gather_stream.wait_event(event)


def shard_groups(module: nn.Module) -> Iterator[ShardGroup]:
    """The groups of `module` and everything inside it, in forward order."""
    for each in module.modules():
        if isinstance(each, FSDPModule):
            state: Any = each._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one or none
            for group in [state._fsdp_param_group] if groups is None else groups:
                if group is not None:
                    yield ShardGroup(each, group)


def settle_shards(module: nn.Module) -> None:
    """Make FSDP2 pad shards now that they have memory, and not in its first forward pass: an optimizer made in between
    would hold memory that FSDP2 has given up. FSDP2 pads by itself in modules that `to_empty` passes through, but
    pipeline stages around a decoder are not among these."""
    for group in shard_groups(module):
        for each in group.torch_group.fsdp_params:
            each.reset_sharded_param()


class Shards:
    """Moves the shards of a model's parameters; a plain parameter is its own shard."""

    def __init__(self, module: nn.Module | None) -> None:
        self.groups = [] if module is None else list(shard_groups(module))
        self.group_of = {id(p): group for group in self.groups for p in group.parameters}

    def place(self, parameter: nn.Parameter, part: Tensor) -> Tensor:
        """Make `part` this rank's shard of `parameter`; returns it as it then lies in memory."""
        if not is_shard(parameter):
            parameter.data = part
            return parameter.data
        replace_local(parameter, part)
        self.group_of[id(parameter)].relocated(parameter)
        return local(parameter)
