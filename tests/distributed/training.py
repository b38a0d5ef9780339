"""A few training steps of a tiny model, on one process or as a rank of several, with everything to compare."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tests.distributed.parts import Parts, held, united
from tests.train.models import TINY, ragged_batch
from tightfit.collectives.shards import as_dtensor, splits_of
from tightfit.jobs.adapter import NOT_ADAPTED, AdapterTraining
from tightfit.jobs.job import Optimizer, PrecisionName
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.quantize import NOT_QUANTIZED, Quantize
from tightfit.levers.adapter import attach, initialise
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.spec import ModelSpec
from tightfit.parallel.mesh import make_mesh
from tightfit.parallel.ranks import ALONE, Ranks
from tightfit.train.assembly import assemble, unfilled
from tightfit.train.optimizer.adamw import MasterAdamW
from tightfit.train.precision import LossScale
from tightfit.train.step import Batch, train_step

CPU = torch.device("cpu")
PLAIN, SETTINGS = Levers(), Optimizer(lr=1e-3, eps=1e-4)
"""With its usual eps Adam makes whole updates of gradients that are all rounding error; weights then tell nothing."""
TIED = replace(TINY, tied=True)
UNEVEN = replace(TINY, vocab_size=97, hidden_size=36, head_dim=6, mlp_size=66, layers=3, qk_norm=True, qkv_bias=True)
"""No size of it is a multiple of four, and four ranks have six numbers of a head's norm between them: one has none."""
GEMMA = replace(
    TIED,
    family="gemma2",
    norm="rms_plus_one",
    sandwich_norms=True,
    activation="gelu_tanh",
    embedding_scale=5.0,
    attention_softcap=20.0,
    logit_softcap=10.0,
    window=4,
    window_layers=(0,),
)
GPT2 = replace(
    TIED,
    family="gpt2",
    kv_heads=4,
    norm="layer",
    activation="gelu_tanh",
    gated=False,
    rope=None,
    output_bias=True,
    mlp_bias=True,
)
"""Without biases of the keys: where positions are learned their gradient is nothing but rounding errors."""


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    spec: ModelSpec = TINY
    rows: int = 8
    steps: int = 2
    data: int = 1
    zero: int = 0
    shard_inside: int = 0
    tensor: int = 1
    expert: int = 1
    sequence_parallel: bool = True
    micro_batch: int = 8
    precision: PrecisionName = "fp32"
    scale: float | None = None
    levers: Levers = PLAIN
    settings: Optimizer = SETTINGS
    quantize: Quantize = NOT_QUANTIZED
    adapter: AdapterTraining = NOT_ADAPTED
    states: bool = False
    """Whether the optimizer's states are gathered at the end: two messages a weight, for those who look at them."""

    @property
    def layout(self) -> Layout:
        return Layout(
            data=self.data,
            zero=self.zero,  # type: ignore[arg-type]
            shard_inside=self.shard_inside,
            tensor=self.tensor,
            sequence_parallel=self.sequence_parallel,
            micro_batch=self.micro_batch,
            expert=self.expert,
        )

    def alone(self) -> "Case":
        """The same on one process that takes all rows at once."""
        return replace(self, data=1, zero=0, shard_inside=0, tensor=1, expert=1, micro_batch=self.rows, levers=PLAIN)

    def alone_in(self, precision: PrecisionName) -> "Case":
        """The same on one process, in another precision."""
        return replace(self.alone(), precision=precision)


@dataclass
class Trace:
    """Per step: loss, gradient norm, tokens, gradients (as the optimizer finds them); weights at the end."""

    results: list[Any] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    first: dict[str, Tensor] = field(default_factory=dict)
    last: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Share:
    """What one rank has of a trace."""

    first: Parts
    results: list[Any] = field(default_factory=list)
    gradients: list[Parts] = field(default_factory=list)
    last: Parts | None = None
    states: Parts | None = None


def run(case: Case) -> Trace:
    """Train as `case` says on one process."""
    assert case.layout.ranks == 1
    return together([train(case, None, ALONE)])


truth = cache(run)
"""The same for many cases, which only look at it."""


def run_rank(case: Case) -> Share:
    """Train as `case` says as a rank of the running group."""
    mesh = mesh_of(case.layout)
    return train(case, mesh, Ranks.of(mesh))


def mesh_of(layout: Layout) -> DeviceMesh:
    """The grid of `layout` over the running group.

    Made once: each of gloo's groups has a thread that wakes a hundred times a second for as long as the process lives.
    """
    degrees = {name: getattr(layout, name) for name in ("pipeline", "data", "context", "ring", "tensor", "expert")}
    inside = {"zero": 1, "shard_inside": layout.shard_inside} if layout.zero_groups > 1 else {}
    return _mesh(**degrees, **inside)


@cache
def _mesh(**degrees: int) -> DeviceMesh:
    return make_mesh(Layout.model_validate(degrees), "cpu")


def train(case: Case, mesh: DeviceMesh | None, ranks: Ranks) -> Share:
    """The steps of one rank."""
    decoder, module, optimizer = build(case, mesh)
    share = Share(held(parameters(decoder)))

    def look(phase: str) -> None:
        if phase == "optimizer":
            share.gradients.append(held(gradients(decoder)))

    scale = LossScale.for_precision(case.precision)
    scale.value = case.scale or scale.value
    for step in range(case.steps):
        batches = micro_batches(case, step, ranks.rank)
        lr = case.settings.lr
        share.results.append(train_step(module, optimizer, batches, CPU, lr, scale, look, ranks))
    share.last = held(parameters(decoder))
    share.states = held(optimizer.state()) if case.states else None
    return share


def together(shares: Sequence[Share]) -> Trace:
    """What all ranks have; of what several have, the copies must be equal to the bit."""
    steps = range(len(shares[0].gradients))
    return Trace(
        shares[0].results,
        [united([share.gradients[step] for share in shares]) for step in steps],
        united([share.first for share in shares]),
        united([share.last for share in shares if share.last is not None]),
        united([share.states for share in shares if share.states is not None]),
    )


def build(case: Case, mesh: DeviceMesh | None) -> tuple[Decoder, torch.nn.Module, MasterAdamW]:
    decoder = unfilled(case.spec, case.layout, case.precision, CPU, case.levers)

    def fill(model: Decoder) -> None:
        torch.manual_seed(5)
        init_weights(model)
        if case.adapter.rank is not None:
            initialise(model, 5)

    if case.adapter.rank is not None:
        attach(decoder, case.adapter, torch.float32)
    module, optimizer = assemble(
        decoder, mesh, case.layout, case.levers, case.precision, case.settings, CPU, fill, quantize=case.quantize
    )
    return decoder, module, optimizer


def parameters(decoder: Decoder) -> dict[str, Tensor]:
    """As parts of whole tensors."""
    splits = splits_of(decoder)
    return {name: as_dtensor(p.detach(), splits.get(name)) for name, p in decoder.named_parameters()}


def gradients(decoder: Decoder) -> dict[str, Tensor]:
    """Of the parameters that have one."""
    splits = splits_of(decoder)
    named = ((name, p.grad) for name, p in decoder.named_parameters())
    return {name: as_dtensor(gradient, splits.get(name)) for name, gradient in named if gradient is not None}


def micro_batches(case: Case, step: int, rank: int) -> list[Batch]:
    """The rows of this rank, in the loader's order: micro-batch i of rank r follows micro-batch i of rank r − 1."""
    batch = ragged_batch(case.rows, seed=step)
    pieces = list(zip(*(value.split(case.micro_batch) for value in batch.values()), strict=True))
    return [dict(zip(batch, piece, strict=True)) for piece in pieces[rank :: case.data]]
