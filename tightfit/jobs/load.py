"""Reading a job: YAML file, then `-o path.to.field=value` overrides, then the schema; every failure is a UserError."""

import difflib
import reprlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tightfit.bounded_files import user_path
from tightfit.bounded_yaml import read_yaml, read_yaml_text
from tightfit.errors import UserError
from tightfit.jobs.common_words import field_of
from tightfit.jobs.fields import field_rows
from tightfit.jobs.job import Job
from tightfit.jobs.section import Section


def load_job(path: Path, overrides: Sequence[str] = ()) -> Job:
    """The job in the YAML file at `path` with `overrides` applied."""
    text = read_yaml_text(path, "a job file", remedy="give the path of a YAML file")
    return parse_job(text, str(path), overrides)


def default_job(overrides: Sequence[str] = ()) -> Job:
    """The embedded job: a small Llama-style model on the text of Python's standard library."""
    text = resources.files("tightfit.jobs").joinpath("stdlib.yaml").read_text(encoding="utf-8")
    return parse_job(text, "the embedded job", overrides)


def parse_job(text: str, source: str, overrides: Sequence[str] = ()) -> Job:
    """The job written in `text`."""
    fields = read_yaml(text, source)
    if not isinstance(fields, dict):
        held = "is empty" if fields is None else f"holds {KINDS.get(type(fields), 'one value')}, not fields"
        raise UserError(f"{source} {held}; start with `model: …`")
    for override in overrides:
        _apply(fields, override)
    try:
        job = Job.model_validate(fields)
    except ValidationError as error:
        raise UserError(_sentence(error, source)) from None
    for name, path in (("output", job.output), ("data.cache", job.data.cache)):
        user_path(path, f"{source}: {name}")
    return job


def _apply(fields: dict[str, Any], override: str) -> None:
    """Set `a.b.c=value` in nested mappings; a short form such as `model: NAME` is widened on the way."""
    path, equals, value = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise UserError(f"override {override!r} is not of the form path.to.field=value, such as steps=10")
    for depth, key in enumerate(keys[:-1]):
        inner = fields.setdefault(key, {})
        if isinstance(inner, str) and key in ("model", "tokenizer", "data"):
            inner = fields[key] = {"train": [inner]} if key == "data" else {"source": inner}
        elif isinstance(inner, list) and key == "data":
            inner = fields[key] = {"train": inner}
        if not isinstance(inner, dict):
            here = ".".join(keys[: depth + 1])
            raise UserError(f"override {override!r} goes below {here}, which is {_shown(inner)} and has no fields")
        fields = inner
    fields[keys[-1]] = read_yaml(value, f"override {override!r}")


def _sentence(error: ValidationError, source: str) -> str:
    """The first problem as one sentence that names the field, the value and the fix; an unknown field before others, as
    it may be the one that is missing."""
    problems = error.errors()
    problem = next((each for each in problems if each["type"] == "extra_forbidden"), problems[0])
    location = [str(part) for part in problem["loc"] if not str(part).startswith(("function-", "list[", "float"))]
    field = ".".join(location) or "job"
    match problem["type"]:
        case "extra_forbidden":
            return f"{source}: unknown field {field} (value {_shown(problem['input'])}){_nearest(location)}"
        case "missing":
            return f"{source}: field {field} is missing; {_documentation(location)}"
        case "value_error":
            return f"{source}: {problem['msg'].removeprefix('Value error, ')}"
    return (
        f"{source}: field {field} is {_shown(problem['input'])}, but {_expected(problem)}; {_documentation(location)}"
    )


EXPECTED = {
    "path_type": "it should be a path",
    "string_type": "it should be text",
    "int_type": "it should be a whole number",
    "int_parsing": "it should be a whole number",
    "int_from_float": "it should be a whole number",
    "float_type": "it should be a number",
    "float_parsing": "it should be a number",
    "bool_type": "it should be true or false",
    "bool_parsing": "it should be true or false",
    "list_type": "it should be a list",
    "too_short": "it should not be empty",
    "tuple_type": "it should be a list of numbers",
    "dict_type": "it should have fields of its own",
    "model_type": "it should have fields of its own",
    "model_attributes_type": "it should have fields of its own",
}
"""Pydantic's types of errors in words for users who write YAML; of other types its own message is used."""


def _expected(problem: Any) -> str:
    message = problem["msg"][0].lower() + problem["msg"][1:]
    return EXPECTED.get(problem["type"], message.replace("input should", "it should"))


KINDS: dict[type, str] = {list: "a list", str: "text"}
"""What a file may hold instead of fields, in such words."""


def _shown(value: Any) -> str:
    """A parsed YAML value as text, truncated where it is long."""
    text = repr(value) if isinstance(value, str | int | float | bool | None) else reprlib.repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _section(location: Sequence[str]) -> type[Section]:
    """The schema that holds the last part of `location`."""
    section: type[Section] = Job
    for part in location[:-1]:
        info = section.model_fields.get(part)
        if info is None or not isinstance(info.annotation, type) or not issubclass(info.annotation, Section):
            break
        section = info.annotation
    return section


def _nearest(location: Sequence[str]) -> str:
    if (field := field_of(location[-1])) is not None:
        return f"; {field} sets that here: {_section(field.split('.')).meaning(field.rpartition('.')[2])}"
    names = list(_section(location).model_fields)
    near = difflib.get_close_matches(location[-1], names, n=1)
    elsewhere = [row.path for row in field_rows() if row.path.rpartition(".")[2] == location[-1]]
    if elsewhere and not near:
        return f"; did you mean {' or '.join(elsewhere)}?"
    return f"; did you mean {near[0]}?" if near else f"; the fields there are {', '.join(names)}"


def _documentation(location: Sequence[str]) -> str:
    text = _section(location).meaning(location[-1]) if location else ""
    return f"it means: {text}" if text else "see `tightfit train --fields`"
