"""Step graph: the kernels of a micro-batch as one CUDA graph, launched at once.

A small model's kernels end before Python has launched the next ones: a layer takes the host about 3 ms, whatever its
size. All micro-batches of a run launch the same kernels on the same shapes, so after a first step, which compiles
missing kernels, they are captured and from then on replayed: the kernels of the plain step, so its numbers to the bit
where the kernels are deterministic. Inputs that change from one micro-batch to the next are in tensors at fixed
addresses: tokens, labels, documents, divisor, loss scale.

There are two graphs, in one memory pool: of the first micro-batch of a step, whose backward makes the gradients, and
of the others, which add to the gradients. Gradients stay in that pool, where the update has read them before the next
replay writes there again. Norm and update are launched as usual, while the card is busy with the graph.
Where weights are updated inside backward, the graph is the whole step, and the learning rate and numbers that depend on
the count of updates are in such tensors as well. The host learns of a loss that is not finite after the replay; the
updates see it on the device (backward_update.py) and change nothing.
The pool is as large as forward and backward need; an evaluation, which needs memory as well, calls `release`, and the
next step is captured anew. A step of other shapes than the one before (with packed documents or without) is launched
kernel by kernel, and captured if the next one has the same.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.errors import UserError
from tightfit.hardware.local import local_machine
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.rules.cuda_graph import may_capture
from tightfit.jobs.workload import Workload
from tightfit.kernels.capture import capturing
from tightfit.kernels.loss.linear_cross_entropy import IGNORE
from tightfit.plan.cost import Costs
from tightfit.train.optimizer.adamw import MasterAdamW
from tightfit.train.optimizer.backward_update import BackwardUpdate
from tightfit.train.optimizer.updaters import DeviceNumbers
from tightfit.train.step import Batch, inputs, objective, require_finite

Arguments = dict[str, Tensor | None]
"""The model's arguments by name; documents may be None."""
Key = tuple[tuple[str, torch.Size], ...]
"""Names and shapes of a micro-batch's arguments."""


@dataclass(frozen=True)
class _Places:
    """Tensors that a graph reads its inputs from and writes its results to."""

    arguments: Arguments
    divisor: Tensor
    """Divisor of the loss: the step's counted tokens."""
    share: Tensor
    """The micro-batch's share of the step's counted tokens, the factor of its auxiliary loss."""
    scale: Tensor
    loss: Tensor
    norm: Tensor
    """Gradient norm, written where the graph updates weights too."""

    def fill(self, arguments: Arguments, divisor: int, share: float, scale: float) -> None:
        for name, place in self.arguments.items():
            if place is not None and (value := arguments[name]) is not None:
                place.copy_(value)
        self.divisor.fill_(divisor)
        self.share.fill_(share)
        self.scale.fill_(scale)


class StepGraph:
    """Forward and backward of `model` on one GPU, for gradients of `weights`."""

    def __init__(self, model: nn.Module, weights: Sequence[Tensor], device: torch.device) -> None:
        self.model, self.device = model, device
        self._weights = weights
        self._last_key: Key | None = None
        self._gave_up = False
        self.release()

    def release(self) -> None:
        """Free the graphs and their memory pool."""
        self._first: torch.cuda.CUDAGraph | None = None
        self._further: torch.cuda.CUDAGraph | None = None
        self._places: _Places | None = None
        self._pool: Any = None
        self._gradients: list[Tensor | None] = []

    @property
    def is_captured(self) -> bool:
        """Whether the last step was replayed."""
        return self._first is not None

    def run(self, batches: Sequence[Batch], counted: Sequence[int], total: int, scale: float) -> Tensor | None:
        """Replay a step and return its mean loss, with gradients set; None where it must be launched kernel by kernel.

        That is so for the first step, for one of other shapes than the step before, and where graphs lack memory.
        """
        passed = [inputs(batch, self.device) for batch in batches]
        if not self._is_like_last(passed):
            return None
        mean = torch.zeros((), device=self.device)
        try:
            first, further, places = self._graphs(passed)
            for graph, arguments, count in zip((first, *further), passed, counted, strict=True):
                places.fill(arguments, total, count / total, scale)
                graph.replay()
                mean += places.loss
        except RuntimeError as error:  # nothing is lost: no weight has changed
            self._give_up(error)
            return None
        self._place_gradients()
        return mean

    def update(self, batch: Batch, lr: float) -> tuple[float, float, int] | None:
        """A step of one micro-batch with updates inside backward; see `UpdatingStepGraph`."""
        raise NotImplementedError

    def _is_like_last(self, passed: Sequence[Arguments]) -> bool:
        """Whether this step has the shapes of the last one and can be replayed; if not, the graphs are released."""
        key = _key(passed)
        if key is None or key != self._last_key or self._gave_up:
            self.release()
            self._last_key = key
            return False
        return True

    def _give_up(self, error: RuntimeError) -> None:
        if not isinstance(error, torch.OutOfMemoryError):
            warnings.warn(f"a step cannot be captured ({error}); it is launched kernel by kernel", stacklevel=3)
        self._gave_up = True
        for weight in self._weights:
            weight.grad = None
        self.release()

    def _graphs(self, passed: Sequence[Arguments]) -> tuple[torch.cuda.CUDAGraph, list[torch.cuda.CUDAGraph], _Places]:
        """The graph of a step's first micro-batch, that of each other one, and the tensors they read and write.

        Missing graphs are captured before any is replayed: if a capture fails, no expert's load has been counted.
        """
        places = self._places or self._prepared(passed[0])
        if self._first is None:
            self._first = self._captured(places)
            self._gradients = [weight.grad for weight in self._weights]
        if len(passed) > 1 and self._further is None:
            self._place_gradients()
            self._further = self._captured(places)
        others = [] if self._further is None else [self._further] * (len(passed) - 1)
        return self._first, others, places

    def _captured(self, places: _Places) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = self.model(**places.arguments, divisor=places.divisor)
            (objective(output, places.share) * places.scale).backward()
            places.loss.copy_(output.loss.detach())
        return graph

    def _prepared(self, arguments: Arguments) -> _Places:
        """A new memory pool, and the tensors that its graphs read and write."""
        torch._C._cuda_clearCublasWorkspaces()  # of the default stream; the graph has its own
        self._pool = torch.cuda.graph_pool_handle()
        copies = {name: None if value is None else value.clone() for name, value in arguments.items()}
        self._places = _Places(copies, *torch.ones(5, device=self.device).unbind())
        return self._places

    def _place_gradients(self) -> None:
        for weight, gradient in zip(self._weights, self._gradients, strict=True):
            weight.grad = gradient


class UpdatingStepGraph(StepGraph):
    """A whole step of one micro-batch as a graph, with `updates` of weights inside backward."""

    def __init__(self, model: nn.Module, optimizer: MasterAdamW, updates: BackwardUpdate, device: torch.device) -> None:
        self.optimizer, self.updates = optimizer, updates
        super().__init__(model, _weights_of(optimizer), device)

    def release(self) -> None:
        """Free the graph and its memory pool."""
        super().release()
        self._numbers: DeviceNumbers | None = None
        self._updated: list[list[int]] = []
        """1 for each weight of each bucket that the graph updates."""

    def update(self, batch: Batch, lr: float) -> tuple[float, float, int] | None:
        """Replay a step and return its loss, gradient norm and counted tokens; None as in `run`.

        Raises NotFiniteError for a loss that is not finite; no weight has changed then.
        """
        passed, counts = inputs(batch, self.device), self.optimizer.counts
        if not self._is_like_last([passed]):
            return None
        try:
            graph, places, numbers = self._whole(passed, lr)
        except RuntimeError as error:  # nothing is lost: no weight has changed
            self.optimizer.counts = counts
            self._give_up(error)
            return None
        tokens = int((batch["labels"] != IGNORE).sum())
        places.fill(passed, max(tokens, 1), share=1.0, scale=1.0)
        numbers.fill(lr, self._count(counts) + 1)
        graph.replay()
        loss, norm = torch.stack([places.loss, places.norm]).tolist()
        require_finite(loss)
        self.optimizer.counts = _sums(counts, self._updated)
        return loss, norm, tokens

    def _whole(self, passed: Arguments, lr: float) -> tuple[torch.cuda.CUDAGraph, _Places, DeviceNumbers]:
        """The graph of a step, captured if missing, and the tensors it reads and writes."""
        places = self._places or self._prepared(passed)
        numbers = self._numbers or self.optimizer.device_numbers(self.device)
        if self._first is None:
            counts = self.optimizer.counts
            with self.optimizer.reading_numbers(numbers):
                graph = self._captured_step(places, lr)
            self._updated = _sums(self.optimizer.counts, counts, sign=-1)
            self.optimizer.counts = counts  # nothing has been updated yet
            self._count(counts)
            self._first, self._numbers = graph, numbers
        return self._first, places, numbers

    def _captured_step(self, places: _Places, lr: float) -> torch.cuda.CUDAGraph:
        graph, updates = torch.cuda.CUDAGraph(), self.updates
        with capturing(graph, pool=self._pool, capture_error_mode="thread_local"):
            updates.begin(lr)
            output = self.model(**places.arguments, divisor=places.divisor)
            assert output.loss is not None
            updates.skip_unless_finite(output.loss.detach())
            objective(output, places.share).backward()
            places.norm.copy_(updates.finish())
            places.loss.copy_(output.loss.detach())
        return graph

    def _count(self, counts: list[list[int]]) -> int:
        """How often the weights that the graph updates have been updated so far; it must be one number for all."""
        pairs = zip(chain(*counts), chain(*self._updated), strict=True)
        found = {count for count, is_updated in pairs if is_updated}
        if len(found) != 1:
            raise RuntimeError(f"its weights have been updated {sorted(found)} times")
        return found.pop()


def step_graph(
    model: nn.Module,
    optimizer: MasterAdamW,
    device: torch.device,
    workload: Workload,
    layout: Layout,
    levers: Levers,
) -> StepGraph | None:
    """The graph of `model`'s steps where this GPU would wait for its host to launch them, by the planner's costs."""
    if device.type != "cuda" or not is_captured(workload, layout, levers, device):
        return None
    if optimizer.in_backward is None:
        return StepGraph(model, _weights_of(optimizer), device)
    if optimizer.settings.l1:  # the host multiplies L1 by the learning rate, so a graph would freeze it
        return None
    return UpdatingStepGraph(model, optimizer, optimizer.in_backward, device)


def is_captured(workload: Workload, layout: Layout, levers: Levers, device: torch.device) -> bool:
    """Whether steps are captured: as the plan for this GPU says; on a card not in the catalog, wherever possible."""
    total = torch.cuda.get_device_properties(device).total_memory
    try:
        machine = local_machine(0, f"{torch.cuda.get_device_name(device)}, {total // 2**20}")
    except UserError:
        return may_capture(workload, layout, levers)
    return Costs(workload, machine).layout_cost(layout).is_captured(levers)


def _weights_of(optimizer: MasterAdamW) -> list[Tensor]:
    return [weight for bucket in optimizer.buckets for weight in bucket.parameters]


def _sums(counts: list[list[int]], others: list[list[int]], sign: int = 1) -> list[list[int]]:
    """counts + sign · others, bucket by bucket and weight by weight."""
    return [[a + sign * b for a, b in zip(*pair, strict=True)] for pair in zip(counts, others, strict=True)]


def _key(passed: Sequence[Arguments]) -> Key | None:
    """Names and shapes of the arguments of all micro-batches of a step; None where the micro-batches differ."""
    keys = {tuple((name, value.shape) for name, value in each.items() if value is not None) for each in passed}
    return keys.pop() if len(keys) == 1 else None
