"""One decoder layer, compressed: its inputs observed, its linear layers pruned and coded in the order they compute.

Every set of linear layers sees inputs that came through the sets already coded, so that later ones can make up for
earlier ones (GPTQ's "true sequential"). AWQ and SmoothQuant first move scales inside the layer, judged on one forward
pass of the unquantized layer. Learned rounding begins when all sets are coded, and leaves the reported errors of their
matrices as they were; its target is the outputs of the original model, so that a layer makes up for the errors of those
before it. Coded weights are put back dequantized, so forward passes cost as before.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tightfit.compress.calibration.activation_scales import activation_scale
from tightfit.compress.calibration.inputs import InputStatistics, output_error
from tightfit.compress.calibration.observation import layer_of, observe, through
from tightfit.compress.linear_sets import EXPERT_STACKS, LinearSet, linear_sets
from tightfit.compress.recipe import CALIBRATED, Recipe, Step
from tightfit.compress.rounding.awq import code_clipped, scale_channels
from tightfit.compress.rounding.gptq import GptqOptions, InverseFactor, gptq
from tightfit.compress.rounding.learned_rounding import LayerTask, learn_rounding
from tightfit.compress.rounding.moving_scales import linear
from tightfit.compress.rounding.scale_refit import nearest_fitted
from tightfit.compress.rounding.smoothquant import smooth
from tightfit.compress.rounding.spqr import SpqrOptions, spqr
from tightfit.compress.structure.pruning import prune_weight
from tightfit.models.decoder import Decoder, Layer
from tightfit.models.quantized.coded_weight import CodedWeight
from tightfit.models.quantized.linear import quantize_linear
from tightfit.models.quantized.ranges import fit_grid
from tightfit.models.quantized.scheme import Scheme

Coded = dict[str, CodedWeight | list[CodedWeight]]
Coder = Callable[[str, Tensor, InputStatistics | None, Step], CodedWeight]


@dataclass(frozen=True)
class LayerResult:
    """The coded weights of a layer by name, the error of each and of the whole, and the layer's new outputs.

    Errors are relative. Of a matrix: the squared change of its outputs over the squared outputs; without calibration
    data, the same of its weights. Of the layer: the squared change of its outputs over the square of what it adds to
    the residual stream; None without data. Where rounding is learned, the errors of the layers before it are included.
    """

    index: int
    coded: Coded
    errors: dict[str, float]
    layer_error: float | None
    outputs: list[Tensor]
    original: list[Tensor]
    """The next layer's inputs in the original model; empty where this one's were not given."""
    seconds: float


@torch.no_grad()
def compress_layer(
    model: Decoder,
    index: int,
    recipe: Recipe,
    inputs: Sequence[Tensor],
    plain_dtype: torch.dtype = torch.float32,
    code: Coder | None = None,
    *,
    original: Sequence[Tensor] = (),
) -> LayerResult:
    """Code layer `index`, the only one that `model` has; `inputs` are its calibration inputs, [B, T, H] each.

    Parameters that are not coded are rounded to `plain_dtype`, in which they will be stored. `code` codes a weight, by
    default `code_weight`. `original` are the layer's inputs in the original model, given where rounding is learned
    (`Recipe.learns`).
    """
    began = time.monotonic()
    layer = layer_of(model, index)
    before = original or inputs
    wanted = through(model, index, before)
    work = _LayerWork(model, layer, index, recipe, inputs, code or code_weight)
    work.move_scales()
    for group in linear_sets(model.spec, index):
        work.code_set(group)
    if inputs and work.originals:
        work.learn(wanted)
    if model.spec.is_routed(index):
        work.code_experts()
    for name, parameter in layer.named_parameters():
        if name not in work.coded and name.removesuffix(".weight") not in work.coded:
            parameter.copy_(parameter.to(plain_dtype))
    outputs = through(model, index, inputs)
    error = change_of_layer(before, wanted, outputs) if inputs else None
    seconds = time.monotonic() - began
    return LayerResult(index, work.coded, work.errors, error, outputs, wanted if original else [], seconds)


def change_of_layer(inputs: Sequence[Tensor], wanted: Sequence[Tensor], outputs: Sequence[Tensor]) -> float:
    """The relative error of a layer, Σ (output − wanted)² / Σ (wanted − input)²."""
    change = sum(float((output - want).square().sum()) for output, want in zip(outputs, wanted, strict=True))
    added = sum(float((want - x).square().sum()) for want, x in zip(wanted, inputs, strict=True))
    return change / max(added, 1e-30)


class _LayerWork:
    """A layer while it is compressed, and the codes and errors so far."""

    def __init__(
        self, model: Decoder, layer: Layer, index: int, recipe: Recipe, inputs: Sequence[Tensor], code: Coder
    ) -> None:
        self.model, self.layer, self.index, self.recipe, self.inputs = model, layer, index, recipe, inputs
        self.code = code
        self.coded: Coded = {}
        self.errors: dict[str, float] = {}
        self.originals: dict[str, Tensor] = {}
        """Float32 weights of matrices whose rounding will be learned, once all matrices are coded."""

    def step_of(self, name: str) -> Step | None:
        """The step that codes a linear layer of this one."""
        return self.recipe.coding(f"layers.{self.index}.{name}")

    def pruning_of(self, name: str) -> Step | None:
        """The step that prunes a linear layer of this one."""
        return self.recipe.pruning(f"layers.{self.index}.{name}")

    def move_scales(self) -> None:
        """Fold the scales of AWQ and SmoothQuant into the layer, before anything is rounded."""
        groups = [group for group in linear_sets(self.model.spec, self.index) if group.before is not None]
        steps = [(group, self.step_of(group.names[0])) for group in groups]
        chosen = [(group, step) for group, step in steps if step is not None and step.method in ("awq", "smoothquant")]
        if not chosen:
            return
        seen = observe(self.model, self.layer, self.inputs, [group.names[0] for group, _ in chosen])
        for group, step in chosen:
            scheme = step.scheme()
            assert scheme is not None
            if step.method == "awq":
                scale_channels(self.layer, group, seen[group.names[0]], scheme)
            else:
                smooth(self.layer, group, seen[group.names[0]], scheme, step)

    def code_set(self, group: LinearSet) -> None:
        """Prune and code the linear layers of a set."""
        names = [name for name in group.names if self.step_of(name) or self.pruning_of(name)]
        if not names:
            return
        seen = None
        if self.inputs:
            seen = observe(self.model, self.layer, self.inputs, [group.names[0]], stop=True)[group.names[0]]
        for name in names:
            module = linear(self.layer, name)
            wanted = module.weight.float()
            if (step := self.step_of(name)) is not None and step.method == "round":
                self.originals[name] = wanted.clone()
            weight, coded = self.compressed(name, wanted, seen)
            self.errors[name] = _relative_error(weight if coded is None else coded.dequantize(), wanted, seen)
            if coded is not None:
                self.coded[name] = coded
            self._put(name, module, weight, coded)

    def learn(self, wanted: Sequence[Tensor]) -> None:
        """Learn the rounding of the matrices that a step `round` names, with `wanted` as the layer's target outputs."""
        coded = {name: self.coded[name] for name in self.originals}
        step = self.step_of(next(iter(coded)))
        assert step is not None
        task = LayerTask(self.model, self.layer, self.inputs, wanted)
        learned = learn_rounding(task, coded, self.originals, steps=step.steps, seed=step.seed)  # type: ignore[arg-type]
        for name, weight in learned.items():
            self.coded[name] = weight
            linear(self.layer, name).weight.copy_(weight.dequantize())
        self.originals.clear()

    def compressed(self, name: str, weight: Tensor, seen: InputStatistics | None) -> tuple[Tensor, CodedWeight | None]:
        """One matrix pruned and coded, where the recipe says so."""
        pruning, step = self.pruning_of(name), self.step_of(name)
        if pruning is not None:
            weight = prune_weight(weight, seen, pruning)
        if step is None:
            return weight, None
        if pruning is not None and self.code is code_weight:
            coded = code_weight(name, weight, seen, step, keep_zeros=True)
        else:
            coded = self.code(name, weight, seen, step)
        if step.static is None:
            return weight, coded
        assert seen is not None, "static scales need calibration inputs"
        return weight, replace(coded, input_scale=activation_scale(seen, coded.scheme, step.static))

    def _put(self, name: str, module: nn.Linear, weight: Tensor, coded: CodedWeight | None) -> None:
        """Put the compressed weight into the layer; a scheme that rounds activations replaces the module, too."""
        if coded is None or coded.scheme.activations is None:
            module.weight.copy_(weight if coded is None else coded.dequantize())
            return
        parent, _, own = name.rpartition(".")
        setattr(self.layer.get_submodule(parent), own, quantize_linear(module, coded))

    def code_experts(self) -> None:
        """Compress experts one by one: gate and up with the statistics of all experts' inputs together.

        The inputs of down are not observed, so it is rounded to nearest and pruned by magnitude.
        """
        names = [name for name in EXPERT_STACKS if self.step_of(name) or self.pruning_of(name)]
        if not names:
            return
        seen = observe(self.model, self.layer, self.inputs, ["mlp"])["mlp"] if self.inputs else None
        for name in names:
            stack: Tensor = self.layer.get_parameter(name)
            own = None if name.endswith("down") else seen
            experts = [self.compressed(name, expert.float(), own) for expert in stack]
            weights = [weight if coded is None else coded.dequantize() for weight, coded in experts]
            changes = [_relative_error(weight, w.float(), own) for weight, w in zip(weights, stack, strict=True)]
            self.errors[name] = sum(changes) / len(changes)
            if self.step_of(name) is not None:
                self.coded[name] = [coded for _, coded in experts if coded is not None]
            stack.copy_(torch.stack(weights))


def code_weight(
    name: str,
    weight: Tensor,
    seen: InputStatistics | None,
    step: Step,
    *,
    keep_zeros: bool = False,
    factor: InverseFactor | None = None,
) -> CodedWeight:
    """The codes of one float32 matrix by the method of `step`; rounded to nearest where no inputs were seen.
    `factor` is what GPTQ makes of these inputs, where it is known already."""
    scheme = step.scheme()
    assert scheme is not None
    if step.method not in CALIBRATED or seen is None:
        return _nearest(weight, scheme, step, None if seen is None else seen.hessian.diagonal())
    if step.method in ("gptq", "round"):  # learned rounding begins with GPTQ's codes
        options = GptqOptions(
            act_order=step.act_order, damping=step.damping, ranges=step.ranges or "mse", keep_zeros=keep_zeros
        )
        return gptq(weight, seen.hessian, scheme, options, factor)
    if step.method == "spqr":
        return spqr(weight, seen.hessian, scheme, SpqrOptions(outlier_share=step.outlier_share, damping=step.damping))
    if step.method == "awq":
        return code_clipped(name, weight, seen.hessian, scheme)
    return _nearest(weight, scheme, step, None)


def _nearest(weight: Tensor, scheme: Scheme, step: Step, importance: Tensor | None) -> CodedWeight:
    """Round to nearest; `rtn` fits scales where steps are wide. SpQR without inputs has no outliers to find."""
    rule = step.ranges or "minmax"
    if step.method == "rtn":
        return nearest_fitted(weight, scheme, rule, importance)
    return fit_grid(weight, scheme, rule, importance).code(weight)


def _relative_error(rounded: Tensor, weight: Tensor, seen: InputStatistics | None) -> float:
    change = rounded - weight
    if seen is None:
        return float(change.square().sum() / weight.square().sum().clamp(min=1e-30))
    hessian = seen.hessian
    return output_error(change, hessian) / max(output_error(weight.clone(), hessian), 1e-30)
