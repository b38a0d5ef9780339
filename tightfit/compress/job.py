"""What every way of making a model smaller is asked: which model, where to, and the text to look at."""

from dataclasses import dataclass
from pathlib import Path

from tightfit.compress.calibration import Calibration, read_calibration
from tightfit.compress.own_text import LONGEST_ROW as OWN_LONGEST_ROW
from tightfit.compress.own_text import MOST_ROWS, own_text, writing_dtype
from tightfit.durable import refuse_existing
from tightfit.errors import UserError
from tightfit.models.loading import has_weights
from tightfit.models.spec import ModelSpec

LONGEST_ROW = 2048
"""Tokens of a calibration row where no length was given."""


@dataclass(frozen=True, kw_only=True)
class ShrinkingJob:
    """What the user asked for, whatever is done to the layers."""

    model: str
    out: Path
    data: tuple[str, ...] = ()
    field: str = "text"
    samples: int = 128
    length: int | None = None
    device: str = "cpu"
    cache: Path = Path("~/.cache/tightfit")
    progress: bool = False

    def require(self) -> None:
        """Refuse what can be refused before the model is looked at."""
        refuse_existing(self.out)
        if not has_weights(self.model):
            raise UserError(f"{self.model} has no weights to compress; give a directory, a run or a GGUF file that has")

    def own_text_shape(self, spec: ModelSpec) -> tuple[int, int]:
        """Rows and tokens of what the model writes where there is no `data`."""
        length = OWN_LONGEST_ROW if self.length is None else self.length
        return min(self.samples, MOST_ROWS), min(length, spec.max_positions)

    @property
    def writing_bytes(self) -> int:
        """Of a number in which the model writes its text; 0 where there is `data`."""
        return 0 if self.data else writing_dtype(self.device).itemsize

    def read_calibration(self, spec: ModelSpec) -> Calibration:
        """Rows of `data`, or where none is given of what the model writes."""
        if not self.data:
            rows, length = self.own_text_shape(spec)
            return own_text(
                self.model,
                spec,
                rows=rows,
                length=length,
                device=self.device,
                cache=self.cache,
                progress=self.progress,
            )
        return read_calibration(
            self.model,
            spec,
            self.data,
            samples=self.samples,
            length=min(LONGEST_ROW, spec.max_positions) if self.length is None else self.length,
            cache=self.cache,
            field=self.field,
            progress=self.progress,
        )
