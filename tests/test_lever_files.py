"""How many product files name a lever or a split in code: what the next one of its kind will have to touch.

A file names a field where an identifier, an attribute, a keyword or a whole string is the field's name; prose does not
count, nor do kernels and servers, whose tiles and contexts are other things. A file that calls one of `QUESTIONS` is
counted apart: it does not know the field's values, but is read by whoever changes what they mean. docs/architecture.md
lists the files.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = ROOT / "tightfit"
OTHER_MEANINGS = ("kernels", "serve", "cli", "compress", "models", "launch")
"""Rooms in which these words are something else, or a flag is only passed on."""
OTHER_FILES = (
    "memory/ledger",
    "memory/measurement",
    "memory/trace",
    "report/timeline",
    "plan/serving/plan",
    "plan/serving/deployment",
    "plan/mfu",
)
FIELDS = {"levers.tiles": 6, "levers.offload": 6, "layout.context": 7}
"""At most so many files name each: fewer is better, and a new one needs a reason."""
QUESTIONS = {
    "levers.tiles": (
        "tile_layers",
        "tiled_launches",
        "tiled_more_s",
        "second_half_is_computed_again",
        "is_tiled",
        "tile_seconds",
    ),
    "levers.offload": ("offloads_states", "offloads_weights", "fill_device", "host_states"),
    "layout.context": (
        "layout.local_length",
        "layout.whole_length",
        "context_ranks_group",
        "sum_over_context_ranks",
        "context_parallel",
    ),
}
"""Functions that answer from the field."""
WITH_ASKING = {"levers.tiles": 14, "levers.offload": 18, "layout.context": 15}
"""At most so many name it or ask."""


def named_in(tree: ast.AST, section: str, name: str) -> bool:
    """Whether the code reads or sets the field `section.name`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == name:
            owner = ast.unparse(node.value)
            if section in owner or "shape" in owner:  # memory/formulas/local_shape.py carries it on
                return True
        if isinstance(node, ast.keyword) and node.arg == name:
            return True
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            return True
        if isinstance(node, ast.Constant) and node.value in (name, f"{section}.{name}"):
            return True
    return False


@cache
def product() -> dict[str, str]:
    """The files of the package in which these words have this meaning, by their path from its root."""
    found = {path.relative_to(PRODUCT).with_suffix("").as_posix(): path for path in sorted(PRODUCT.rglob("*.py"))}
    return {
        name: path.read_text(encoding="utf-8")
        for name, path in found.items()
        if name.split("/")[0] not in OTHER_MEANINGS and not name.startswith(OTHER_FILES)
    }


@cache
def files_of(field: str) -> list[str]:
    """Product files that name `field`."""
    section, name = field.split(".")
    return [file for file, text in product().items() if name in text and named_in(ast.parse(text), section, name)]


@cache
def asking(field: str) -> list[str]:
    """Product files that do not name `field`, but ask a question about it."""
    question = re.compile(rf"\b({'|'.join(QUESTIONS[field])})\(")
    return [file for file, text in product().items() if question.search(text) and file not in files_of(field)]


def line_of(field: str) -> str:
    """The line of docs/architecture.md."""
    named, others = (", ".join(f"`{each}`" for each in files) for files in (files_of(field), asking(field)))
    return f"- `{field}` ({len(files_of(field))}): {named}; asked about by {len(asking(field))}: {others}."


@pytest.mark.parametrize("field", FIELDS)
def test_no_more_files_name_a_lever_or_a_split(field: str) -> None:
    assert len(files_of(field)) <= FIELDS[field], f"docs/architecture.md had fewer: {line_of(field)}"
    assert len(files_of(field) + asking(field)) <= WITH_ASKING[field], (
        f"docs/architecture.md had fewer: {line_of(field)}"
    )


def test_search_advice_descriptions_and_exports_name_no_tiles() -> None:
    """They go through jobs/lever_table.py; what else is split, through jobs/layout.py's SPLITS."""
    rooms = ("plan/", "exports/")
    named = {file for file in files_of("levers.tiles") if file.startswith(rooms) and "seconds" not in file}
    assert not named - {"plan/cost"}
    assert not {"jobs/engine", "jobs/rules/deepspeed", "exports/deepspeed"} & set(files_of("layout.context"))
