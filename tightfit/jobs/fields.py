"""The fields of a job as rows, for `tightfit train --fields` and the documentation."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic_core import PydanticUndefined

from tightfit.jobs.job import Job
from tightfit.jobs.section import Section


@dataclass(frozen=True)
class FieldRow:
    """One field: its dotted path, its type, its default as YAML would write it, and what it means."""

    path: str
    type: str
    default: str
    meaning: str


def field_rows(section: type[Section] = Job, prefix: str = "") -> Iterator[FieldRow]:
    """Every field of the schema in file order, sections flattened."""
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            yield from field_rows(info.annotation, f"{prefix}{name}.")
            continue
        default = info.get_default(call_default_factory=True)
        yield FieldRow(f"{prefix}{name}", _type_name(info.annotation), _default(default), section.meaning(name))


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _type_name(annotation: Any) -> str:
    """A type as a reader of YAML would write it: `one of [a, b]`, `list[str]`, `int | None`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return f"one of [{', '.join(map(str, arguments))}]"
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin in (Union, UnionType):
        return " | ".join(_type_name(each) for each in arguments)
    if origin is not None:
        return f"{origin.__name__}[{', '.join(_type_name(each) for each in arguments)}]"
    return "None" if annotation is NoneType else annotation.__name__
