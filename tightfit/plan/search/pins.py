"""Pins: fields of the layout and the levers that the user has decided; the search fills in the rest."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from tightfit.errors import UserError
from tightfit.jobs.engine import Engine
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.section import Section

SECTIONS: dict[str, type[Section]] = {"layout": Layout, "levers": Levers}


@dataclass(frozen=True)
class Pins:
    """Decided fields, by name; `of_engine` names those that another engine decides, such as `levers.loss`."""

    layout: Mapping[str, Any] = field(default_factory=dict)
    levers: Mapping[str, Any] = field(default_factory=dict)
    of_engine: frozenset[str] = frozenset()
    engine: str = ""

    def __bool__(self) -> bool:
        return bool(self.layout or self.levers)

    def __str__(self) -> str:
        said = [f"{section}.{name}={getattr(self, section)[name]}" for section, name in self.own()]
        return ", ".join([*said, *([f"--engine {self.engine}"] if self.of_engine else [])])

    def own(self) -> Iterator[tuple[str, str]]:
        """Section and name of the fields that the user has decided."""
        for section in SECTIONS:
            yield from ((section, name) for name in getattr(self, section) if f"{section}.{name}" not in self.of_engine)

    def without(self, section: str, name: str) -> "Pins":
        """These pins without one of them."""
        kept = {key: value for key, value in getattr(self, section).items() if key != name}
        return replace(self, layout=kept) if section == "layout" else replace(self, levers=kept)

    def with_levers(self, levers: Mapping[str, Any]) -> "Pins":
        """These pins, and some levers besides."""
        return replace(self, levers={**self.levers, **levers})

    def with_engine(self, engine: Engine) -> "Pins":
        """These pins, and the fields that `engine` fixes; a UserError where it cannot split as pinned."""
        for name, value in engine.fixed_layout:
            if self.layout.get(name, value) != value:
                raise UserError(
                    f"layout.{name} is pinned to {self.layout[name]}, but {engine.is_for} has {value}; drop the pin, "
                    "or give another --engine"
                )
        layout = {name: value for name, value in engine.fixed_layout if name not in self.layout}
        levers = {name: value for name, value in engine.fixed_levers if name not in self.levers}
        fixed = (*(f"layout.{name}" for name in layout), *(f"levers.{name}" for name in levers))
        return Pins({**layout, **self.layout}, {**levers, **self.levers}, frozenset(fixed), engine.name)


def parse_pins(texts: Sequence[str]) -> Pins:
    """Pins from `layout.zero=3`, `levers.offload=none`; a UserError names a mistake."""
    found: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for text in texts:
        path, equals, value = text.partition("=")
        section, dot, name = path.strip().partition(".")
        if not equals or not dot or section not in SECTIONS:
            raise UserError(f"pin {text!r} is not of the form layout.FIELD=value or levers.FIELD=value")
        found[section][name] = _value(section, name, value)
    return Pins(found["layout"], found["levers"])


def _value(section: str, name: str, text: str) -> Any:
    from tightfit.bounded_yaml import read_yaml  # takes as long to import as a plan takes to find

    schema = SECTIONS[section]
    info = schema.model_fields.get(name)
    if info is None:
        near = [f"{other}.{name}" for other in SECTIONS if name in SECTIONS[other].model_fields]
        near = near or difflib.get_close_matches(name, schema.model_fields, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the fields are {', '.join(schema.model_fields)}"
        raise UserError(f"there is no field {section}.{name} to pin; {hint}")
    try:
        schema_of_field: Any = Annotated[info.annotation, info]
        return TypeAdapter(schema_of_field).validate_python(read_yaml(text, f"pin {section}.{name}={text!r}"))
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        wrong = problem[0].lower() + problem[1:]
        raise UserError(f"pin {section}.{name} is {text!r}, but {wrong}; it means: {schema.meaning(name)}") from None
