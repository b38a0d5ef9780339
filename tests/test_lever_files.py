"""How many product files name a lever or a split in code: what the next one of its kind will have to touch.

A file names a field where an identifier, an attribute, a keyword or a whole string is the field's name; prose does not
count, nor do kernels and servers, whose tiles and contexts are other things. docs/architecture.md lists the files.
"""

import ast
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
    "plan/serving",
    "plan/deployment",
    "plan/mfu",
)
FIELDS = {"levers.tiles": 17, "levers.offload": 24, "layout.context": 19}
"""At most so many files name each: fewer is better, and a new one needs a reason."""


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


def files_of(field: str) -> list[str]:
    """Product files that name `field`, from the root of the package."""
    section, name = field.split(".")
    found = []
    for path in sorted(PRODUCT.rglob("*.py")):
        inside = path.relative_to(PRODUCT).with_suffix("").as_posix()
        if inside.split("/")[0] in OTHER_MEANINGS or inside.startswith(OTHER_FILES):
            continue
        if named_in(ast.parse(path.read_text(encoding="utf-8")), section, name):
            found.append(inside)
    return found


def line_of(field: str) -> str:
    """The line of docs/architecture.md."""
    files = files_of(field)
    return f"- `{field}` ({len(files)}): {', '.join(f'`{each}`' for each in files)}."


@pytest.mark.parametrize("field", FIELDS)
def test_no_more_files_name_a_lever_or_a_split(field: str) -> None:
    assert len(files_of(field)) <= FIELDS[field], f"docs/architecture.md had fewer: {line_of(field)}"


def test_search_advice_descriptions_and_exports_name_no_tiles() -> None:
    """They go through jobs/lever_table.py; what else is split, through jobs/layout.py's SPLITS."""
    assert not {file for file in files_of("levers.tiles") if file.startswith("plan/") and "seconds" not in file} - {
        "plan/cost"
    }
    assert not {"jobs/engine", "jobs/rules/deepspeed", "plan/export/deepspeed"} & set(files_of("layout.context"))
