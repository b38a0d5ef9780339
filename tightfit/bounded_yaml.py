"""YAML in bounded time: what a few hundred bytes can unfold to is limited before it is built.

Plain YAML lets a short text unfold: aliases of aliases make billions of values, a number of base 60 takes time that
grows with the square of its length, and a key given twice silently wins. Here the tree is counted as it is composed,
aliases at the size they unfold to; numbers have a length that numbers have; a key given twice is refused.
"""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from tightfit.bounded_files import read_bounded
from tightfit.errors import UserError

MOST_VALUES = 50_000
MOST_DEPTH = 20
"""Lists inside of lists: for each one that opens, PyYAML looks at all that are open."""
MOST_CHARACTERS = 1_000_000
LONGEST_NUMBER = 64
TOO_DEEP = "it is nested too deeply"
FAILURES = (yaml.YAMLError, RecursionError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
"""What PyYAML raises: its own errors, and whatever its constructors do with a tag on the wrong text."""


def read_yaml_file(path: Path, what: str, *, remedy: str) -> Any:
    """The value in the YAML file at `path`, which is `what` (such as "a recipe"); errors of reading end in `remedy`."""
    return read_yaml(read_yaml_text(path, what, remedy=remedy), str(path))


def read_yaml_text(path: Path, what: str, *, remedy: str) -> str:
    """The text of the YAML file at `path`, for `read_yaml`."""
    try:
        return read_bounded(path, MOST_CHARACTERS, what).decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; {remedy}") from None
    except OSError as error:
        noun = what.partition(" ")[2]  # without its article
        raise UserError(f"cannot read {noun} {path}: {error.strerror}; {remedy}") from None


def read_yaml(text: str, source: str) -> Any:
    """The value of the YAML `text` from `source`; every failure is a UserError."""
    if len(text) > MOST_CHARACTERS:
        raise UserError(f"{source} is longer than {MOST_CHARACTERS:,} characters; write it shorter")
    try:
        return yaml.load(text, Loader=_Loader)
    except FAILURES as error:
        if isinstance(error, UserError):
            raise
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        where = f" line {mark.line + 1}" if mark is not None else ""
        raise UserError(f"{source}{where} is not valid YAML: {_reason(error)}") from None


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return TOO_DEEP
    told = getattr(error, "problem", None) or error
    return str(told).split("\n", 1)[0] or type(error).__name__


class _Loader(yaml.SafeLoader):
    """Safe YAML with limits, which refuses a key given twice where plain YAML would silently keep the last."""

    values = 0
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.values += 1
        if self.values > MOST_VALUES:
            raise yaml.MarkedYAMLError(problem=f"it holds more than {MOST_VALUES:,} values")
        if self.depth == MOST_DEPTH:
            raise yaml.MarkedYAMLError(problem=TOO_DEEP)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def get_single_node(self) -> yaml.Node | None:
        root = super().get_single_node()
        if root is not None and _unfolded(root, {}) > MOST_VALUES:
            raise yaml.MarkedYAMLError(
                problem=f"its aliases unfold to more than {MOST_VALUES:,} values; write the fields out",
                problem_mark=root.start_mark,
            )
        return root

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        text = super().construct_scalar(node)
        is_number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        if is_number and isinstance(text, str) and len(text) > LONGEST_NUMBER:
            problem = f"a number of {len(text):,} characters"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return text

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """As PyYAML does, but a tag that does not fit its text (`!!timestamp x`) is an error with its line."""
        try:
            return super().construct_object(node, deep=deep)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError):
            tag = node.tag.removeprefix("tag:yaml.org,2002:")
            shown = f"{str(node.value)[:40]!r}" if isinstance(node, yaml.ScalarNode) else "what follows"
            raise yaml.MarkedYAMLError(problem=f"{shown} is no {tag}", problem_mark=node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.MarkedYAMLError(problem="a field's name is not a word", problem_mark=key_node.start_mark)
            if key in seen:
                problem = f"field {str(key)[:80]!r} is given twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _unfolded(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values `node` stands for: aliases as often as they are used, without end if one holds itself."""
    if id(node) not in known:
        known[id(node)] = MOST_VALUES + 1  # the count for aliases inside it that lead back to it
        inside: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            inside = node.value
        elif isinstance(node, yaml.MappingNode):
            inside = [each for pair in node.value for each in pair]
        known[id(node)] = 1 + sum(_unfolded(each, known) for each in inside)
    return known[id(node)]
