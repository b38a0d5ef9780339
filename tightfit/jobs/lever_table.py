"""The table of levers: the facts about each lever besides its field (levers.py) and its rules (rules/).

Search, advice, descriptions, engines and exports loop over these rows and name no lever. A row has the values that a
search tries, which of two values needs less memory, the lever's words in a sentence, advice for a run that does not
fit, which other engines have it, and properties that rules about other settings ask for (recomputes layers, has its
own products or updates, needs the host). Bytes are in memory/formulas, seconds in plan/seconds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tightfit.counted import counted

if TYPE_CHECKING:
    from tightfit.jobs.levers import Levers

LOSS_CHUNK_BYTES = 256 * 2**20
OFFLOADED = {"none": 0, "optimizer": 1, "weights": 2}
NARROWED = {"fp32": -1, "auto": 0, "bf16": 1, "8bit": 2, "factored": 3}
STATES = {
    "fp32": "float32 optimizer states",
    "bf16": "bf16 optimizer states (lossy)",
    "8bit": "8-bit optimizer states (lossy)",
    "factored": "factored second moment (lossy)",
}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which values of levers a search may try."""

    host: bool = True
    """Whether states and checkpoints may be in host memory."""
    lossy: bool = False
    """Whether optimizer states may be narrower."""
    long_rows: bool = False
    """Whether rows are long enough for tiles."""
    one_rank: bool = False
    """Whether the run has one rank; only then updates in backward are searched."""


def _no_words(levers: "Levers") -> str:
    return ""


def _never(levers: "Levers") -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class LeverRow:
    """The facts about one lever; functions of `Levers` are asked with a whole set of levers."""

    name: str
    words: "Callable[[Levers], str]" = _no_words
    """The lever in words; empty where it is at its default, or where another row describes it too."""
    values: Callable[[Wanted], tuple[Any, ...]] | None = None
    """Values that a search tries, weakest first: a later one never needs more memory. None: only a pinned value."""
    strength: Callable[[Any], float] = float
    """From a value to a number, larger for less memory."""
    for_memory_alone: "Callable[[Levers], bool]" = _never
    """Whether a search, given the other levers, uses it only for its memory: it saves a little time too, which is not
    worth the change in what a step computes."""
    advice: tuple[str, tuple[Any, ...]] | None = None
    """Name and values to try, weakest first, if a run does not fit: values that the search leaves out, as they save
    little or cost much. Together with the searched values they are every lossless way to need less memory."""
    last_resort: Any = None
    """The value searched on several ranks only if nothing else fits; None: searched at once, or only advised."""
    value_in_other_engines: Any = None
    """Its fixed value in engines that do not have the lever; None where they have it."""
    works_with_deepspeed: bool = False
    """Whether it works with `engine: deepspeed`, as it acts inside a layer or its loss, or DeepSpeed has it itself."""
    recomputes: "Callable[[Levers], bool]" = _never
    """Whether it makes parts of layers be recomputed in backward."""
    values_with_torch_products: tuple[Any, ...] | None = None
    """Values at which linear layers are torch's own products with whole weights, strongest last; None: all values."""
    own_update: "Callable[[Levers], bool]" = _never
    """Whether our own kernels update the weights instead of torch's AdamW."""
    asks_host: "Callable[[Levers], bool]" = _never
    """Whether the host copies or decides something between the kernels of a step, so that it cannot be a CUDA graph."""


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _checkpointing(levers: "Levers") -> str:
    """`checkpoint one layer in 2, keeping attention, kept on the host`."""
    if levers.checkpoint_budget_bytes is not None:
        words = f"recompute all but {_gib(levers.checkpoint_budget_bytes)} of activations"
    elif levers.num_checkpoints:
        words = f"checkpoint {counted(levers.num_checkpoints, 'layer')}"
    elif levers.checkpoint_every:
        which = "every layer" if levers.checkpoint_every == 1 else f"one layer in {levers.checkpoint_every}"
        words = f"checkpoint {which}"
    else:
        return ""
    kept = "" if levers.checkpoint_keep == "nothing" else f", keeping {levers.checkpoint_keep}"
    lossy = " in fp8 (lossy)" if levers.checkpoint_format == "fp8" else ""
    return f"{words}{kept}{f', kept on the host{lossy}' if levers.offload_checkpoints else ''}"


def _offload(levers: "Levers") -> str:
    if levers.offload == "none":
        return ""
    here = f" but for {_gib(levers.offload_keep_bytes)}" if levers.offload_keep_bytes else ""
    which = "optimizer" if levers.offload == "optimizer" else "weights and optimizer"
    return f"{which} on the host{here}"


def _loss(levers: "Levers") -> str:
    if levers.loss == "plain":
        return "plain loss"
    if levers.loss_chunk_bytes == LOSS_CHUNK_BYTES:
        return ""
    size = levers.loss_chunk_bytes / 2**20
    return f"loss chunks of {size:.3g} MiB" if size else "smallest loss chunks"


def _changes_by_hand(levers: "Levers") -> bool:
    """Whether the host passes arguments to kernels that change with each update, beyond AdamW's own scalars."""
    return levers.optimizer_states == "factored" or levers.rounding == "stochastic"


LEVER_TABLE = (
    LeverRow(
        name="offload",
        words=_offload,
        values=lambda wanted: ("none", "optimizer", "weights") if wanted.host else ("none",),
        strength=OFFLOADED.__getitem__,
        works_with_deepspeed=True,
        values_with_torch_products=("none", "optimizer"),
        own_update=lambda levers: levers.offload != "none",
        asks_host=lambda levers: levers.offload != "none",
    ),
    LeverRow(
        name="optimizer_states",
        words=lambda levers: STATES.get(levers.optimizer_states, ""),
        values=lambda wanted: ("auto", "bf16", "8bit") if wanted.lossy else ("auto",),
        strength=NARROWED.__getitem__,
    ),
    LeverRow(
        name="checkpoint_every",
        words=_checkpointing,
        values=lambda wanted: (0, 4, 2, 1),
        strength=lambda every: 1 / every if every else 0,
        works_with_deepspeed=True,
        recomputes=lambda levers: levers.checkpoint_every > 0,
    ),
    LeverRow(name="num_checkpoints", works_with_deepspeed=True, recomputes=lambda levers: levers.num_checkpoints > 0),
    LeverRow(name="checkpoint_keep", works_with_deepspeed=True),
    LeverRow(
        name="checkpoint_budget_bytes",
        works_with_deepspeed=True,
        recomputes=lambda levers: levers.checkpoint_budget_bytes is not None,
    ),
    LeverRow(
        name="offload_checkpoints",
        values=lambda wanted: (False, True) if wanted.host else (False,),
        value_in_other_engines=False,
        asks_host=lambda levers: levers.offload_checkpoints,
    ),
    LeverRow(
        name="matmul",
        words=lambda levers: "" if levers.matmul == "native" else f"{levers.matmul} matmuls (lossy)",
        values_with_torch_products=("native",),
    ),
    LeverRow(
        name="tiles",
        words=lambda levers: f"layers in {levers.tiles} tiles" if levers.tiles > 1 else "",
        values=lambda wanted: (1, 8) if wanted.long_rows else (1,),
        advice=("layers in tiles", (8, 64)),
        value_in_other_engines=1,
        works_with_deepspeed=True,
        recomputes=lambda levers: levers.tiles > 1,
        values_with_torch_products=(1,),
    ),
    LeverRow(
        name="loss_chunk_bytes",
        values=lambda wanted: (LOSS_CHUNK_BYTES, 0),
        strength=lambda chunk_bytes: -chunk_bytes,
        value_in_other_engines=LOSS_CHUNK_BYTES,
        works_with_deepspeed=True,
    ),
    LeverRow(
        name="loss",
        words=_loss,
        values=lambda wanted: ("fused",),
        strength=lambda loss: loss == "fused",
        value_in_other_engines="plain",
        works_with_deepspeed=True,
    ),
    LeverRow(
        name="rounding",
        words=lambda levers: "weights rounded stochastically" if levers.rounding == "stochastic" else "",
        own_update=lambda levers: levers.rounding == "stochastic",
    ),
    LeverRow(
        name="update_in_backward",
        words=lambda levers: (
            "updates in backward (clipped by the norm of the step before)" if levers.update_in_backward else ""
        ),
        values=lambda wanted: (False, True) if wanted.one_rank else (False,),
        for_memory_alone=lambda levers: levers.offload == "none",
        advice=("updates in backward", (True,)),
        last_resort=True,
        value_in_other_engines=False,
        own_update=lambda levers: levers.update_in_backward,
        asks_host=lambda levers: levers.update_in_backward and _changes_by_hand(levers),
    ),
    LeverRow(
        name="cuda_graph",
        words=lambda levers: "steps as CUDA graphs" if levers.cuda_graph == "always" else "",
        value_in_other_engines="never",
    ),
    LeverRow(name="offload_gradient_bytes", advice=("no gradients that wait for the host", (0,))),
)
VALUES_IN_OTHER_ENGINES = tuple(
    (row.name, row.value_in_other_engines) for row in LEVER_TABLE if row.value_in_other_engines is not None
)
"""Levers that only tightfit has, with their fixed values in other engines."""
NO_HOST = (*VALUES_IN_OTHER_ENGINES, ("offload", "none"))
"""The same for engines that do not offload states either."""
SAID_FIRST = "checkpoint_every"
OWN_UPDATES = tuple((row.name, row.own_update) for row in LEVER_TABLE if row.own_update is not _never)


def describe_levers(levers: "Levers") -> str:
    """`checkpoint every layer, optimizer on the host`."""
    rows = sorted(LEVER_TABLE, key=lambda row: row.name != SAID_FIRST)
    return ", ".join(text for row in rows if (text := row.words(levers))) or "none needed"


def recomputes(levers: "Levers") -> bool:
    """Whether any part of a layer may be computed again in backward."""
    return any(row.recomputes(levers) for row in LEVER_TABLE)


def with_own_products(levers: "Levers") -> Iterator[tuple[LeverRow, Any, Any]]:
    """Levers that replace torch's own products with whole weights in linear layers.

    Yields the row, the lever's value, and the strongest value that would leave these products alone.
    """
    for row in LEVER_TABLE:
        value = getattr(levers, row.name)
        if row.values_with_torch_products is not None and value not in row.values_with_torch_products:
            yield row, value, row.values_with_torch_products[-1]


def own_updates(levers: "Levers") -> set[str]:
    """Names of the levers because of which our kernels, not torch's AdamW, make the update."""
    return {name for name, is_own in OWN_UPDATES if is_own(levers)}


def asking_host(levers: "Levers") -> str | None:
    """The name of the first lever that needs the host between the kernels of a step; None without."""
    return next((row.name for row in LEVER_TABLE if row.asks_host(levers)), None)
