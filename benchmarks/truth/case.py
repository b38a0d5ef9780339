"""Cases of the memory truth table: one training step of a shape under one layout and its levers.

Of our decoder or of Hugging Face's own model. Cases are what rows begin with, so that a row can be asked again.
"""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from tightfit.jobs.job import PrecisionName
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.models.resolve import resolve_spec
from tightfit.models.spec import ModelSpec
from tightfit.plan.search.pins import parse_pins

Implementation = Literal["tightfit", "huggingface"]
Table = Literal["memory_truth", "lever_truth", "split_truth", "family_truth", "rank_lever_truth"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row's question."""

    model: str
    sequence_length: int
    micro_batch: int
    precision: PrecisionName = "bf16"
    checkpoint_every: int = 0
    loss: Literal["fused", "plain"] = "fused"
    accumulation: int = 1
    zero: Literal[0, 1, 2, 3] = 0
    ranks: int = 1
    """All ranks; those that `split` does not use are data ranks."""
    implementation: Implementation = "tightfit"
    more: str = ""
    """Further levers, as `tiles=4 checkpoint_keep=attention`. Cases with some have a table of their own."""
    split: str = ""
    """Further fields of the layout, as `tensor=4 sequence_parallel=false`. So have these."""
    stage: int = 0
    """Of a pipeline: whose memory it is."""
    layers: int = 0
    """So many of the model's layers, where all of them are too large for one GPU; 0 means all."""
    is_family: bool = False
    """Whether it is of the table of all families."""

    @classmethod
    def of_row(cls, row: dict[str, str]) -> "Case":
        """The case a row of the results file is about."""
        made: dict[str, Any] = {}
        for field in fields(cls):
            if text := row.get(field.name, ""):
                made[field.name] = int(text) if text.isdigit() else text
        return cls(**made, is_family="layers" in row)

    @property
    def table(self) -> Table:
        """The results file it belongs to."""
        if self.is_family:
            return "family_truth"
        if self.more and self.ranks > 1:
            return "rank_lever_truth"
        if self.split:
            return "split_truth"
        return "lever_truth" if self.more else "memory_truth"

    @property
    def workload(self) -> Workload:
        """Its step."""
        rows = self.micro_batch * self.accumulation * self.layout.data
        return Workload(
            spec=self.spec, sequence_length=self.sequence_length, global_batch=rows, precision=self.precision
        )

    @property
    def spec(self) -> ModelSpec:
        """Its model, of `layers` layers."""
        spec = resolve_spec(self.model)
        if not self.layers:
            return spec
        windowed = tuple(layer for layer in spec.window_layers if layer < self.layers)
        return replace(spec, layers=self.layers, window_layers=windowed)

    @property
    def layout(self) -> Layout:
        """How it is spread."""
        given = parse_pins([f"layout.{each}" for each in self.split.split()]).layout
        others = given.get("tensor", 1) * given.get("pipeline", 1) * given.get("context", 1)
        return Layout(data=self.ranks // others, zero=self.zero, micro_batch=self.micro_batch, **given)

    @property
    def levers(self) -> Levers:
        """What it spends less of."""
        given = parse_pins([f"levers.{each}" for each in self.more.split()]).levers
        return Levers(checkpoint_every=self.checkpoint_every, loss=self.loss, **given)

    def columns(self) -> dict[str, Any]:
        """As the first columns of a row: only tables of splits say which and which stage, only families' how deep."""
        no_split = not self.split and self.table != "rank_lever_truth"
        left_out = {
            "more": not self.more and not self.is_family,
            "split": no_split,
            "stage": no_split,
            "layers": not self.is_family,
            "is_family": True,
        }
        return {name: value for name, value in asdict(self).items() if not left_out.get(name)}
