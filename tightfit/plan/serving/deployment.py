"""A served model over several cards: how many cards hold one copy, how many copies there are, and what each card holds.

A copy takes the fewest cards that hold it with its requests: tensor ranks inside a node first, then pipeline stages
(over nodes too); the remaining cards serve further copies. If no split holds that many requests, the one with most
requests per card is taken. Bytes of one card, with t tensor ranks and p stages:

    weights   (layers · ⌈L/p⌉/L + embedding or head) / t
    cache     requests · length · bytes a token · ⌈L/p⌉/L / min(t, key/value heads)
    work      (one prefill chunk through one layer + the logits of all requests) / t

and they fit where their sum is at most SHARE of the card. Limits: all stages are assumed to have ⌈L/p⌉ layers; a
layer's working set is divided by t though its residual stream is not.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tightfit.counted import counted
from tightfit.errors import UserError
from tightfit.hardware.machine import Machine
from tightfit.jobs.precision import FLOAT32_BYTES
from tightfit.jobs.rules.shapes import indivisible
from tightfit.memory.formulas.layer import layer_cost
from tightfit.memory.formulas.local_shape import LocalShape, ceil
from tightfit.memory.formulas.overheads import DEFAULT
from tightfit.memory.formulas.serving import PREFILL_TOKENS, CacheFormat, seen_cache_bytes
from tightfit.models.spec import ModelSpec

ELEMENT_BYTES = 2
SHARE = 0.9
"""Share of a card's memory that a server may use; engines such as vLLM have the same default."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """`replicas` copies of a model, each over `tensor` × `pipeline` cards of `machine`."""

    model: str
    spec: ModelSpec
    machine: Machine
    length: int
    """Tokens of a request, prompt and answer."""
    requests: int
    """Concurrent requests on each copy."""
    tensor: int = 1
    pipeline: int = 1
    replicas: int = 1
    cache: CacheFormat = "model"

    @property
    def cards(self) -> int:
        """Cards of one copy."""
        return self.tensor * self.pipeline

    @property
    def spans_nodes(self) -> bool:
        """Whether one copy needs cards of several machines."""
        return self.cards > self.machine.per_node

    @property
    def dtype(self) -> str:
        """bfloat16 where the card has it, else float16."""
        return "bfloat16" if self.machine.accelerator.rates.bf16 else "float16"

    @property
    def weight_bytes(self) -> int:
        """Weights on one card of the largest stage."""
        spec = self.spec
        both_ends = spec.vocabulary_params + spec.head_params
        ends = spec.vocabulary_params if self.pipeline > 1 else both_ends
        layers = spec.params() - both_ends
        return ELEMENT_BYTES * ceil(ceil(layers * self.stage_layers, spec.layers) + ends, self.tensor)

    @property
    def stage_layers(self) -> int:
        """Layers of the stage that has most."""
        return ceil(self.spec.layers, self.pipeline)

    @property
    def work_bytes(self) -> int:
        """A prefill chunk through one layer, logits of all requests, workspace and the CUDA context."""
        prompt = LocalShape(self.spec, rows=1, length=min(PREFILL_TOKENS, self.length), element_bytes=ELEMENT_BYTES)
        layer = layer_cost(prompt, self.spec.layers - 1).forward_working
        logits = FLOAT32_BYTES * self.spec.vocab_size * self.requests
        return ceil(layer + logits, self.tensor) + DEFAULT.workspace_bytes // 2 + DEFAULT.context_bytes

    @property
    def request_bytes(self) -> int:
        """Keys and values of one request at full length, on one card; vLLM keeps a window's positions alone."""
        whole = seen_cache_bytes(self.spec, 1, self.length, ELEMENT_BYTES, self.cache)
        shared = min(self.tensor, self.spec.kv_heads)
        return ceil(whole * self.stage_layers, self.spec.layers * shared)

    @property
    def peak_bytes(self) -> int:
        """Bytes that one card needs."""
        return self.weight_bytes + self.work_bytes + self.requests * self.request_bytes

    @property
    def room_bytes(self) -> int:
        """Bytes of one card that a server may use."""
        return int(SHARE * self.machine.accelerator.memory_bytes)

    @property
    def fits(self) -> bool:
        """Whether one card's share of the copy fits into `room_bytes`."""
        return self.peak_bytes <= self.room_bytes

    def describe(self) -> str:
        """One line for the user."""
        peak, room = (f"{value / 2**30:.1f} GiB" for value in (self.peak_bytes, self.room_bytes))
        ranks = {"tensor": self.tensor, "pipeline": self.pipeline}
        splits = " × ".join(f"{name} {degree}" for name, degree in ranks.items() if degree > 1) or "one card"
        copies = "1 copy" if self.replicas == 1 else f"{self.replicas} copies"
        load = f"{counted(self.requests, 'request')} of {counted(self.length, 'token')} at a time on each copy"
        return f"{self.model} on {self.machine.text}: {copies} of {splits}; {peak} of {room} on a card; {load}"


def make_deployment(
    model: str,
    spec: ModelSpec,
    machine: Machine,
    *,
    length: int | None = None,
    requests: int = 64,
    tensor: int | None = None,
    pipeline: int | None = None,
    replicas: int | None = None,
    cache: CacheFormat = "model",
) -> Deployment:
    """The deployment of `model`: given splits are kept, the others are the smallest that fit.

    If `requests` do not fit on a card beside the weights, as many as fit are taken.
    """
    wanted = min(4096, spec.max_positions) if length is None else length
    if not 2 <= wanted <= spec.max_positions:
        raise UserError(f"--max-length is {wanted}, but the model has {spec.max_positions} positions; give 2 to that")
    asked = Deployment(model=model, spec=spec, machine=machine, length=wanted, requests=requests, cache=cache)
    for number, name in ((tensor, "tensor"), (pipeline, "pipeline"), (replicas, "replicas")):
        if number is not None and number < 1:
            raise UserError(f"--{name} is {number}; give at least 1")
    tried = list(_splits(asked, tensor, pipeline))
    found = next((each for each in tried if each.fits), None)
    if found is None:
        fewer = (smaller for each in tried if (smaller := _with_fewer_requests(each)).fits)
        found = max(fewer, key=lambda each: each.requests / each.cards, default=None)
    if found is None:
        raise UserError(_does_not_fit(asked, tried))
    return _replicated(found, replicas)


def _splits(asked: Deployment, tensor: int | None, pipeline: int | None) -> Iterator[Deployment]:
    """Ways to split one copy, in the order in which they are tried: without stages first, then by number of cards."""
    machine = asked.machine
    for number, most, name, of in (
        (tensor, machine.per_node, "tensor", "in a node"),
        (pipeline, min(machine.ranks, asked.spec.layers), "pipeline", "with a layer each"),
    ):
        if number is not None and number > most:
            raise UserError(f"--{name} is {number}, but {machine.text} has {counted(most, 'card')} {of}; lower it")
    if tensor is not None and (sentence := indivisible(asked.spec, tensor)):
        raise UserError(sentence.replace("layout.tensor", "--tensor"))
    tensors = [tensor] if tensor else [t for t in range(1, machine.per_node + 1) if indivisible(asked.spec, t) is None]
    stages = [pipeline] if pipeline else list(range(1, min(machine.ranks, asked.spec.layers) + 1))
    # A copy lies within a node, or takes whole nodes.
    cards = {*range(1, machine.per_node + 1), *range(machine.per_node, machine.ranks + 1, machine.per_node)}
    pairs = [(t, p) for t in tensors for p in stages if t * p in cards]
    for t, p in sorted(pairs, key=lambda pair: (pair[1] > 1, pair[0] * pair[1], pair[1])):
        yield replace(asked, tensor=t, pipeline=p)


def _with_fewer_requests(asked: Deployment) -> Deployment:
    """The same with as many concurrent requests as fit beside the weights, at least one."""
    while asked.requests > 1 and not asked.fits:
        asked = replace(asked, requests=max(1, asked.requests * 3 // 4))
    return asked


def _replicated(found: Deployment, replicas: int | None) -> Deployment:
    per_node = found.machine.per_node // found.cards
    most = found.machine.ranks // found.cards if found.spans_nodes else per_node * found.machine.nodes
    if replicas is not None and replicas > most:
        raise UserError(
            f"--replicas is {replicas}, but {found.machine.text} holds {most} copies of {found.cards} cards; lower it"
        )
    return replace(found, replicas=replicas or most)


def _does_not_fit(asked: Deployment, tried: list[Deployment]) -> str:
    if not tried:
        return f"{asked.machine.text} cannot hold that many tensor ranks times stages; lower --tensor or --pipeline"
    best = min((replace(each, requests=1) for each in tried), key=lambda each: each.peak_bytes)
    need, room = (f"{value / 2**30:.1f} GiB" for value in (best.peak_bytes, best.room_bytes))
    return (
        f"{asked.model} needs {need} on each of {best.cards} cards of {asked.machine.text}, which give {room}; "
        "name more or larger cards with --on, or lower --max-length"
    )
