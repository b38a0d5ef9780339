"""The loss of a Hugging Face model without its logits.

The class's own forward runs on a proxy of the model, which differs in two attributes: its `lm_head` returns the hidden
states and its `loss_function` passes them to the fused loss. So everything else in a family's forward (images, router
losses, outputs) stays its own code, and no attribute of the model changes while it runs. Without labels the model
itself runs, as before.

The fused loss runs inside the call of the real `lm_head`, whose forward takes the labels, so that hooks which gather
weights around modules (FSDP2, DeepSpeed ZeRO-3, Accelerate's offload) have gathered this one.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.loss.loss_utils import ForCausalLMLoss

from tightfit.errors import UserError
from tightfit.hf.logits import LogitsOnDemand
from tightfit.hf.replacement import Method, Replacement
from tightfit.kernels.loss.cross_entropy import softcapped
from tightfit.kernels.loss.linear_cross_entropy import CHUNK_BYTES, IGNORE, linear_cross_entropy
from tightfit.kernels.triton_support import Impl

TAKES_LOSS = "_takes_loss"
"""Marks our forward of a head; adapters added later hide it, and the head is then called like any other."""


@dataclass(frozen=True)
class HeadHandler:
    """A model with `lm_head` and `loss_function`; `softcap` is the name of the logit cap in its config."""

    softcap: str | None = None
    part: Literal["loss"] = "loss"

    def replacements(self, module: nn.Module, impl: Impl) -> Iterator[Replacement]:
        yield Replacement(module, "forward", _without_logits(type(module).forward, self.softcap))
        head = module.lm_head
        if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward:
            yield Replacement(head, "forward", _linear_or_loss(impl))


class _Proxy:
    """Has the attributes of `under`, except for those replaced by `own`."""

    def __init__(self, under: Any, **own: Any) -> None:
        self._under = under
        for name, value in own.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._under, name)


@cache
def _without_logits(forward: Method, softcap_name: str | None) -> Method:
    """`forward`, except that with labels the loss is computed from hidden states."""
    position = list(inspect.signature(forward).parameters).index("labels") - 1

    @wraps(forward)
    def forward_without_logits(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = args[position] if len(args) > position else kwargs.get("labels")
        if labels is None or not _can_fuse(self):
            return forward(self, *args, **kwargs)
        softcap = None if softcap_name is None else getattr(self.config, softcap_name)
        wants_dict = kwargs.pop("return_dict", None)
        output = forward(_proxy(self, softcap, softcap_name), *args, return_dict=True, **kwargs)
        output = _with_logits_on_demand(self, output, softcap)
        wants_dict = self.config.return_dict if wants_dict is None else wants_dict
        return output if wants_dict else output.to_tuple()

    return forward_without_logits


def _can_fuse(model: Any) -> bool:
    """Whether to fuse: not with a user's own loss, nor in an evaluation under torch.compile, which must return real
    tensors."""
    traced_evaluation = torch.compiler.is_compiling() and not torch.is_grad_enabled()
    return model.loss_function is ForCausalLMLoss and not traced_evaluation


def _proxy(model: Any, softcap: float | None, softcap_name: str | None) -> _Proxy:
    config = model.config if softcap_name is None else _Proxy(model.config, **{softcap_name: None})
    return _Proxy(model, config=config, lm_head=lambda hidden: hidden, loss_function=_fused_loss(model, softcap))


def _with_logits_on_demand(model: Any, output: Any, softcap: float | None) -> Any:
    """The output without logits; in an evaluation, with logits that are computed on first use.

    Not in training: data parallel wrappers read every output, and a loss computed from these would have no gradient.
    """
    fields = {name: value for name, value in output.items() if name != "logits"}
    if not torch.is_grad_enabled():
        hidden = output.logits
        shape = (*hidden.shape[:-1], model.config.get_text_config().vocab_size)
        fields["logits"] = LogitsOnDemand(
            lambda: softcapped(model.lm_head(hidden), softcap), shape, _linear_dtype(hidden), hidden.device
        )
    return type(output)(**fields)


def _linear_dtype(hidden: Tensor) -> torch.dtype:
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _fused_loss(model: Any, softcap: float | None) -> Callable[..., Tensor]:
    """What transformers' ForCausalLMLoss computes, from hidden states in place of logits."""

    def loss_function(
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORE,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        hidden, targets = logits.reshape(-1, logits.shape[-1]), shift_labels
        if targets is None:
            targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = targets.reshape(-1).to(hidden.device)
        if len(hidden) != len(targets):
            raise UserError(
                f"labels name {len(targets)} tokens for {len(hidden)} positions; with logits_to_keep, give "
                "shift_labels for the positions that are kept"
            )
        request = _LossRequest(targets, ignore_index, num_items_in_batch, softcap)
        return _loss_through(model.lm_head, hidden, request, vocab_size)

    return loss_function


@dataclass(frozen=True)
class _LossRequest:
    """Targets and divisor (None: their number) of the loss that a head computes."""

    targets: Tensor
    ignore_index: int
    divisor: Tensor | int | None
    softcap: float | None

    def of_logits(self, logits: Tensor, rows: slice) -> Tensor:
        """The summed loss of `rows`, from their logits."""
        logits = softcapped(logits.float(), self.softcap)
        return F.cross_entropy(logits, self.targets[rows], ignore_index=self.ignore_index, reduction="sum")

    def of_hidden(self, hidden: Tensor, head: nn.Linear, impl: Impl) -> Tensor:
        """The loss over all hidden states, divided by `divisor`."""
        targets = self.targets.to(hidden.device)  # a hook may have moved the hidden states to the head's device
        return linear_cross_entropy(
            hidden,
            head.weight,
            targets,
            bias=head.bias,
            ignore_index=self.ignore_index,
            softcap=self.softcap,
            reduction="mean" if self.divisor is None else "sum",
            divisor=self.divisor,
            impl=impl,
        )


def _loss_through(head: nn.Module, hidden: Tensor, request: _LossRequest, vocab_size: int) -> Tensor:
    """The loss: fused if the head has our forward; through any other head (adapters, quantized weights) in chunks whose
    logits are computed again in backward."""
    if getattr(vars(head).get("_old_forward", head.forward), TAKES_LOSS, False):
        return head(hidden, request)
    rows = max(1, CHUNK_BYTES // (4 * vocab_size))
    spans = [slice(start, start + rows) for start in range(0, len(hidden), rows)]

    def of_span(h: Tensor, span: slice) -> Tensor:
        return request.of_logits(head(h), span)

    total = torch.stack([checkpoint(of_span, hidden[span], span, use_reentrant=False) for span in spans]).sum()
    if request.divisor is None:
        return total / (request.targets != request.ignore_index).sum().clamp(min=1)
    return total / request.divisor


@cache
def _linear_or_loss(impl: Impl) -> Method:
    def forward(self: nn.Linear, input: Tensor, request: _LossRequest | None = None) -> Tensor:
        return F.linear(input, self.weight, self.bias) if request is None else request.of_hidden(input, self, impl)

    setattr(forward, TAKES_LOSS, True)
    return forward
