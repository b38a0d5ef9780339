"""Section: the base class of every part of a job file; the type of its paths."""

import ast
import inspect
import textwrap
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError


def _not_empty(given: Any) -> Any:
    if given == "":
        raise PydanticCustomError("path_type", "it should be a path")
    return given


Place = Annotated[Path, BeforeValidator(_not_empty)]
"""A path; an empty one is refused, as it would be the working directory."""


class Section(BaseModel):
    """Frozen; unknown fields are errors; the strings below fields are their documentation."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def meaning(cls, field: str) -> str:
        """The docstring of a field, on one line; empty where the source file cannot be read.

        Pydantic's own option would parse the source of every section at import, which takes longer than a plan.
        """
        return _docstrings(cls).get(field, "")


@cache
def _docstrings(section: type[Section]) -> dict[str, str]:
    """The string below each annotated name of a class."""
    try:
        statements = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    except (OSError, SyntaxError):
        return {}
    assert isinstance(statements, ast.ClassDef)
    found = {}
    for field, below in pairwise(statements.body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            found[ast.unparse(field.target)] = " ".join(ast.literal_eval(below.value).split())
    return found
