"""Settings that all methods of compression share: the model, the output directory, the calibration text."""

from dataclasses import dataclass
from pathlib import Path

from tightfit.compress.calibration.calibration import Calibration, read_calibration, refuse_long_rows
from tightfit.compress.calibration.own_text import LONGEST_ROW as OWN_LONGEST_ROW
from tightfit.compress.calibration.own_text import MOST_ROWS, own_text, writing_dtype
from tightfit.durable import require_new
from tightfit.errors import UserError
from tightfit.models.loading import has_weights, weights_path
from tightfit.models.spec import ModelSpec

LONGEST_ROW = 2048
"""Tokens of a calibration row where no length was given."""
DATA_ROWS = 128
"""Calibration rows of a user's text where no number was given."""


@dataclass(frozen=True, kw_only=True)
class ShrinkingJob:
    """What the user asked for, but for the method."""

    model: str
    out: Path
    data: tuple[str, ...] = ()
    field: str = "text"
    samples: int | None = None
    length: int | None = None
    device: str = "cpu"
    cache: Path = Path("~/.cache/tightfit")
    progress: bool = False

    def require(self) -> None:
        """Refuse what can be refused before the model is read."""
        require_new(self.out)
        weights_path(self.model)  # which says so where there is no such model
        if not has_weights(self.model):
            raise UserError(f"{self.model} has no weights to compress; give a directory, a run or a GGUF file that has")

    def own_text_shape(self, spec: ModelSpec) -> tuple[int, int]:
        """Rows, and tokens in each, of the text that the model generates where there is no `data`."""
        rows = MOST_ROWS if self.samples is None else self.samples
        if rows > MOST_ROWS:
            raise UserError(f"--samples is {rows}, but a model writes {MOST_ROWS} at most; lower it or give --data")
        refuse_long_rows(self.length or 0, spec)
        return rows, min(OWN_LONGEST_ROW, spec.max_positions) if self.length is None else self.length

    @property
    def writing_bytes(self) -> int:
        """Bytes of a number while the model generates its text; 0 where there is `data`."""
        return 0 if self.data else writing_dtype(self.device).itemsize

    def read_calibration(self, spec: ModelSpec) -> Calibration:
        """Calibration rows of `data`, or of text that the model generates where none is given."""
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
            samples=DATA_ROWS if self.samples is None else self.samples,
            length=min(LONGEST_ROW, spec.max_positions) if self.length is None else self.length,
            cache=self.cache,
            field=self.field,
            progress=self.progress,
        )
