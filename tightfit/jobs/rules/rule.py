"""Rule: one combination of settings that is refused; Run: the facts that rules check; and the four lists of rules."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, Generic, TypeVar

from tightfit.models.spec import ModelSpec

if TYPE_CHECKING:
    from tightfit.jobs.adapter import Adapted
    from tightfit.jobs.layout import Layout
    from tightfit.jobs.levers import Levers
    from tightfit.jobs.quantize import WeightRounding

Subject = TypeVar("Subject")
Sentence = Callable[[Subject], str | None]


@dataclass(frozen=True, kw_only=True)
class Run:
    """How a model is trained; facts that are not known yet are None or at their default."""

    layout: "Layout"
    levers: "Levers"
    precision: str | None = None
    accumulation: int | None = None
    """Micro-batches of a data rank per optimizer step."""
    spec: ModelSpec | None = None
    sequence_length: int | None = None
    distills: bool = False
    """Whether the run has a teacher."""
    compares_features: bool = False
    rounding: "WeightRounding | None" = None
    """How weights are rounded while they are trained."""
    adapted: "Adapted | None" = None
    """Adapters that are trained on top of a frozen model."""
    shrinks: bool = False
    """Whether every step moves weights towards zero (optimizer.l1)."""
    keeps_zeros: bool = False
    """Whether weights that are zero stay so (optimizer.keep_zeros)."""

    @property
    def extras(self) -> frozenset[str]:
        """The members of EXTRAS that this run uses."""
        distills = self.distills or self.compares_features
        return frozenset(
            compress(
                EXTRAS,
                (distills, self.rounding is not None, self.adapted is not None, self.weight_setting is not None),
            )
        )

    @property
    def weight_setting(self) -> str | None:
        """The setting that makes an update depend on whole weights besides their gradients; None without."""
        return "optimizer.l1" if self.shrinks else "optimizer.keep_zeros" if self.keeps_zeros else None


EXTRAS = ("distill", "quantize", "adapter", "optimizer")
"""Sections of a job that most runs do not use; rules that concern only these are then skipped."""


@dataclass(frozen=True)
class Rule(Generic[Subject]):
    """One refused combination of settings; `sentence` returns the refusal of a subject, or None."""

    name: str
    concerns: tuple[str, ...]
    sentence: Sentence[Subject]

    @cached_property
    def sections(self) -> frozenset[str]:
        """The sections of a job that the rule concerns."""
        return frozenset(concern.partition(".")[0] for concern in self.concerns)


LEVER_RULES: "list[Rule[Levers]]" = []
LAYOUT_RULES: "list[Rule[Layout]]" = []
RUN_RULES: list[Rule[Run]] = []
DEEPSPEED_RULES: list[Rule[Run]] = []


def rule(book: list[Rule[Subject]], *concerns: str) -> Callable[[Sentence[Subject]], Sentence[Subject]]:
    """Decorator that adds a function to the list `book` as a rule about the fields `concerns`."""

    def enter(sentence: Sentence[Subject]) -> Sentence[Subject]:
        book.append(Rule(sentence.__name__, concerns, sentence))
        return sentence

    return enter


def first_refusal(rules: Sequence[Rule[Subject]], subject: Subject) -> str | None:
    """The sentence of the first rule that refuses `subject`; None if all allow it."""
    for each in rules:
        if sentence := each.sentence(subject):
            return sentence
    return None
