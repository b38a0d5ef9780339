"""BaseModel: the frozen model that an adapter on disk was trained on, from base.json beside it; without torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.bounded_files import LARGEST_RECORD_BYTES, read_json
from tightfit.errors import UserError
from tightfit.models.quantized.scheme import Scheme

BASE_FILE = "base.json"
FORMAT = 1
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class BaseModel:
    """The model that an adapter was trained on: its source and a digest of its weights."""

    source: str
    digest: str
    scheme: dict[str, Any] | None = None
    """How its plain linear layers were rounded on loading, as fields of a Scheme; None where they were not."""
    dtype: str = "float32"
    """The dtype in which its weights were loaded, before any rounding."""

    @property
    def rounding(self) -> Scheme | None:
        """The scheme in which its linear layers were rounded as they were loaded; None where they were not."""
        return None if self.scheme is None else Scheme(**self.scheme)


def is_adapted(directory: Path) -> bool:
    """Whether a directory holds an adapter that names its model."""
    return (directory / BASE_FILE).is_file()


def read_base(directory: Path) -> BaseModel:
    """The base.json in `directory`, checked."""
    path = directory / BASE_FILE
    content = read_json(path, LARGEST_RECORD_BYTES, "a base model", remedy="copy the checkpoint again")
    try:
        if content.pop("format") != FORMAT:
            raise UserError(f"{path} was written by another version of tightfit; read it with that one")
        base = BaseModel(**content)
        if not all(isinstance(text, str) for text in (base.source, base.digest, base.dtype)):
            raise TypeError("a field is no text")
        if base.dtype not in DTYPES:
            raise TypeError(f"there is no dtype {base.dtype!r:.40}")
        base.rounding  # noqa: B018  fields of a scheme, or an error
        return base
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error}); copy the checkpoint again") from None
