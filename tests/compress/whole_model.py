"""What `--fit` measures, by its definition, with the whole model in memory: a pass of autograd through all layers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.compress.fit.bit_choice import PLAIN_BITS, scheme_of, units
from tightfit.compress.memory import CHUNK_SHARE
from tightfit.compress.rounding.scale_refit import nearest_fitted
from tightfit.models.decoder import Decoder


def rounded(weight: Tensor, bits: int, group: int) -> Tensor:
    return nearest_fitted(weight.detach(), scheme_of(bits, group)).dequantize()


@contextmanager
def rounded_to(model: Decoder, bits: Mapping[str, int], group: int) -> Iterator[None]:
    """All layers rounded to the bits of their units; the weights come back afterwards."""
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for unit, names in units(model.spec).items():
            for name in names if bits[unit] != PLAIN_BITS else ():
                weight = model.get_parameter(f"{name}.weight")
                weight.copy_(rounded(weight, bits[unit], group))
    yield
    model.load_state_dict(kept)


@torch.no_grad()
def predictions(model: Decoder, rows: Sequence[Tensor]) -> list[Tensor]:
    """Log-probabilities of every row."""
    logits = [model(tokens).logits for tokens in rows]
    return [found.log_softmax(-1) for found in logits if found is not None]


def divergence(model: Decoder, rows: Sequence[Tensor], original: Sequence[Tensor]) -> float:
    """Mean KL(original ‖ model) a token."""
    pairs = zip(original, predictions(model, rows), strict=True)
    return float(torch.cat([(p.exp() * (p - q)).sum(-1).flatten() for p, q in pairs]).mean())


def whole_sensitivities(
    model: Decoder, rows: Sequence[Tensor], widths: Sequence[int], group: int
) -> dict[str, dict[int, float]]:
    """By unit and width: ½ · mean of Σ g_o² Δ_oj² x_j², scaled to what all layers at that width lose."""
    named, found = units(model.spec), dict[str, dict[int, float]]()
    seen = {name: list[Tensor]() for names in named.values() for name in names}
    pairs = {name: torch.zeros_like(model.get_parameter(f"{name}.weight")) for name in seen}
    handles = []
    for name, kept in seen.items():
        module = model.get_submodule(name)
        handles.append(module.register_forward_hook(lambda _, x, y, kept=kept: kept.extend((x[0], y))))
    generator, original = torch.Generator().manual_seed(0), predictions(model, rows)
    for kept in seen.values():
        kept.clear()
    for tokens in rows:
        logits = model(tokens).logits
        assert logits is not None
        parts = logits.flatten(0, 1).split(max(model.spec.hidden_size // CHUNK_SHARE, 1))
        drawn = torch.cat([torch.multinomial(p.softmax(-1), 1, generator=generator)[:, 0] for p in parts])
        outputs = [kept[1] for kept in seen.values()]
        gradients = torch.autograd.grad(F.cross_entropy(logits.flatten(0, 1), drawn, reduction="sum"), outputs)
        for (name, kept), gradient in zip(seen.items(), gradients, strict=True):
            pairs[name] += torch.einsum("bto,bti->oi", gradient.square(), kept[0].detach().square())
            kept.clear()
    for handle in handles:
        handle.remove()
    tokens_total = sum(tokens.numel() for tokens in rows)
    for unit, names in named.items():
        found[unit] = {}
        for bits in widths:
            change = {n: rounded(w := model.get_parameter(f"{n}.weight"), bits, group) - w.detach() for n in names}
            found[unit][bits] = sum(float((change[n].square() * pairs[n]).sum()) for n in names) / 2 / tokens_total
    for bits in widths:
        with rounded_to(model, dict.fromkeys(named, bits), group):
            factor = divergence(model, rows, original) / sum(each[bits] for each in found.values())
        for each in found.values():
            each[bits] *= factor
    return found
