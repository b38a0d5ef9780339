"""ChatTemplate: a model's Jinja template, rendered in a sandbox that bounds its access, its work and its output.

The environment is that of transformers (trimmed blocks, loop controls, `tojson`, `raise_exception`, `strftime_now`,
`{% generation %}`), so texts are the same; a test compares them on templates people use. Beyond its sandbox, which
forbids underscored attributes and changes to what is passed in, all work is paid for from a budget
(`template_limits.py`): operators and calls where the sandbox intercepts them, loops, slices and concatenations through
filters that the template's syntax tree is rewritten to use, so the compiler cannot fold a constant of gigabytes either.
Alternatives tried: a process with a time limit, which costs more than the rendering; a signal, which cannot interrupt
a single allocation and works in the main thread alone.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import cache, lru_cache, wraps
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from tightfit.errors import UserError
from tightfit.models.text.chat_spans import Span
from tightfit.models.text.template_limits import (
    TURN,
    TemplateTooCostlyError,
    counted,
    limited,
    paid,
    refuse_growth,
    sized,
    spend,
    spend_deep,
)

LONGEST_TEMPLATE = 200_000
LONGEST_TEXT, LONGER = 2**20, 4
"""The most characters of a rendering: LONGEST_TEXT, and LONGER times those of the messages. A tokenizer takes some 250
bytes for each."""
COSTLY_FILTERS = ("urlize", "pprint", "random", "xmlattr", "striptags")
"""No template of a model uses them, and their work is not in proportion to their input, or differs each time."""


class ChatTemplate:
    """A compiled template."""

    def __init__(self, source: str) -> None:
        if len(source) > LONGEST_TEMPLATE:
            raise UserError(f"the chat template has {len(source):,} characters; the most are {LONGEST_TEMPLATE:,}")
        try:
            with limited(len(source)):
                self._compiled = _environment(len(source)).from_string(source)
        except Exception as error:
            raise UserError(f"the model's chat template cannot be used: {_why(error)}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> tuple[str, list[Span]]:
        """The conversation as one text, and the spans of it that the template marks with `{% generation %}`."""
        characters = sum(len(text) for message in messages for text in message.values() if isinstance(text, str))
        spans: list[Span] = []
        pieces: list[str] = []
        token = _marks.set((pieces, spans))
        try:
            with limited(characters):
                fields = {"messages": list(messages), "tools": None, "documents": None, **values}
                most = LONGEST_TEXT + LONGER * (characters + len(str(fields["tools"] or "")))
                for piece in self._compiled.generate(**fields):
                    spend(len(piece))
                    pieces.append(piece)
                    if (most := most - len(piece)) < 0:
                        raise TemplateTooCostlyError("it makes too much text")
            return "".join(pieces), spans
        except Exception as error:  # a template is its author's program and fails in its own ways
            roles = [str(message.get("role")) for message in messages]
            shown = ", ".join(roles[:6]) + (", …" if len(roles) > 6 else "")
            raise UserError(f"the model's chat template rejects a conversation of {shown}: {_why(error)}") from error
        finally:
            _marks.reset(token)


@lru_cache(maxsize=16)
def chat_template(source: str) -> ChatTemplate:
    """The template `source`, compiled once."""
    return ChatTemplate(source)


def _why(error: BaseException) -> str:
    if isinstance(error, TemplateTooCostlyError):
        return f"{error}, more than laying out a conversation can need"
    if isinstance(error, RecursionError):
        return "it calls itself without end"
    return (str(error).splitlines() or [type(error).__name__])[0]


_marks: ContextVar[tuple[list[str], list[Span]]] = ContextVar("marks")


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` around what the assistant says."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_record_span"), [], [], body).set_lineno(line)

    def _record_span(self, caller: Macro) -> str:
        text = caller()
        pieces, spans = _marks.get()
        start = sum(map(len, pieces))
        spend(len(pieces))
        spans.append((start, start + len(text)))
        return text


class _Namespace(Namespace):
    """Jinja's, without names that begin with an underscore."""

    def __init__(*arguments: Any, **fields: Any) -> None:
        self, rest = arguments[0], arguments[1:]
        Namespace.__init__(self, {_public(name): value for name, value in dict(*rest, **fields).items()})

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(_public(name), value)


def _public(name: Any) -> Any:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")
    return name


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox in which operators, calls, filters and loops are paid for."""

    intercepted_binops = frozenset(("+", "*", "**", "%", "/", "//", "-"))
    template_characters = 0

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        return _Metered(self).visit(tree)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _refuse_product(left, right)
        elif operator == "**":
            _refuse_power(left, right)
        elif operator == "%" and isinstance(left, str):
            refuse_growth("__mod__", left, right if isinstance(right, tuple) else (right,), {})
        else:
            spend(sized(left) + sized(right))
        return paid(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, /, *arguments: Any, **options: Any) -> Any:
        spend(4 * TURN + (self.template_characters if isinstance(function, Macro) else 0))
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)  # the sandbox wraps str.format
        if isinstance(owner, str | bytes | int | list | tuple | dict):
            refuse_growth(getattr(function, "__name__", ""), owner, arguments, options)
        return paid(super().call(context, function, *arguments, **options))


def _refuse_product(left: Any, right: Any) -> None:
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | bytes | list | tuple) and isinstance(times, int):
            spend(min(len(sequence) * max(times, 0), 2**62))
            return
    sized(left)
    sized(right)


def _refuse_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > 2**12:
        raise TemplateTooCostlyError("it computes with numbers that are too long")


class _Metered(NodeTransformer):
    """Rewrites loops, slices and concatenations to go through filters that are paid for."""

    def __init__(self, environment: _Environment) -> None:
        self.environment = environment

    def visit_For(  # noqa: N802
        self, node: nodes.For, *arguments: Any, **options: Any
    ) -> nodes.Node:
        self.generic_visit(node, *arguments, **options)
        text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.iter = _filter(node.iter, "metered_loop", [nodes.Const(TURN + text)])
        return node

    def visit_Getitem(  # noqa: N802
        self, node: nodes.Getitem, *arguments: Any, **options: Any
    ) -> nodes.Node:
        self.generic_visit(node, *arguments, **options)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = [part or nodes.Const(None) for part in (node.arg.start, node.arg.stop, node.arg.step)]
        return _filter(node.node, "metered_slice", bounds).set_lineno(node.lineno)

    def visit_Compare(  # noqa: N802
        self, node: nodes.Compare, *arguments: Any, **options: Any
    ) -> nodes.Node:
        self.generic_visit(node, *arguments, **options)
        node.expr = _deep(node.expr)
        for operand in node.ops:
            operand.expr = _deep(operand.expr)
        return node

    def visit_Pair(self, node: nodes.Pair, *arguments: Any, **options: Any) -> nodes.Node:  # noqa: N802
        self.generic_visit(node, *arguments, **options)
        node.key = _deep(node.key)
        return node

    def visit_Concat(  # noqa: N802
        self, node: nodes.Concat, *arguments: Any, **options: Any
    ) -> nodes.Node:
        self.generic_visit(node, *arguments, **options)
        return _filter(nodes.List(node.nodes), "metered_concat", []).set_lineno(node.lineno)


def _deep(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _filter(node, "metered_value", [])


def _value(value: Any) -> Any:
    """`value`, which is about to be compared, hashed or printed, paid for with everything nested in it."""
    if isinstance(value, list | tuple | dict | set):
        spend_deep(value)
    elif isinstance(value, str):
        spend(1 + len(value) // TURN)
    return value


def _filter(subject: Any, name: str, arguments: list[nodes.Expr]) -> nodes.Filter:
    return nodes.Filter(subject, name, arguments, [], None, None)


def _loop(values: Any, price: int) -> Any:
    return values if isinstance(values, Undefined) else counted(values, price)


def _slice(value: Any, start: Any, stop: Any, step: Any) -> Any:
    spend(sized(value))
    return value[start:stop:step]


def _concat(parts: Iterable[Any]) -> str:
    texts = [str(_value(part)) for part in parts]
    spend(sum(map(len, texts)))
    return "".join(texts)


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test that is paid for; keeps Jinja's mark on functions that get a context (`jinja_pass_arg`)."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        spend(TURN)
        if len(arguments) > first:
            refuse_growth(name, arguments[first], arguments[first + 1 :], options)
        return paid(function(*arguments, **options))

    return call


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike Jinja's own, it leaves HTML alone."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _now(form: str) -> str:
    spend(len(form))
    return datetime.now().strftime(form[:100])


def _range(*bounds: Any) -> range:
    found = range(*bounds)
    spend(len(found))
    return found


@cache
def _tables() -> tuple[dict[str, Any], dict[str, Any]]:
    """Filters and tests, metered."""
    plain = ImmutableSandboxedEnvironment()
    filters = {name: call for name, call in plain.filters.items() if name not in COSTLY_FILTERS}
    filters["tojson"] = _to_json
    filters |= {name: _metered(name, cast(Any, call)) for name, call in filters.items()}
    filters |= {"metered_loop": _loop, "metered_slice": _slice, "metered_concat": _concat, "metered_value": _value}
    return filters, {name: _metered(name, cast(Any, call)) for name, call in plain.tests.items()}


def _environment(template_characters: int) -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_value
    )
    environment.filters, environment.tests = (dict(table) for table in _tables())
    environment.globals = {"raise_exception": _raise, "strftime_now": _now, "range": _range, "namespace": _Namespace}
    environment.globals["dict"] = lambda *arguments, **fields: dict(*arguments, **fields)
    environment.template_characters = template_characters
    return environment
