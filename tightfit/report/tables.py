"""Tables that the CLI prints, and the same values as JSON."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tightfit.models.spec import ModelSpec
from tightfit.printable import printable, printable_json
from tightfit.report.console import output_console
from tightfit.report.escaping import escape

if TYPE_CHECKING:
    from tightfit.jobs.fields import FieldRow
    from tightfit.models.saving import Export
    from tightfit.train.evaluation import Evaluation


SHOWN_NUMBERS = 8
"""Lists of more fractions than this are told by their length."""


def print_json(value: Any) -> None:
    """Print one JSON document to stdout; NaN and infinity, which JSON lacks, are null."""
    print(printable_json(json.dumps(finite(value), indent=2, default=str, ensure_ascii=False, allow_nan=False)))


def finite(value: Any) -> Any:
    """`value` with None for numbers that are not finite, also inside lists and mappings."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list | tuple) else value


def gib(count: float) -> str:
    """Bytes as GiB or MiB, and few as KiB or bytes; nothing is `0 MiB`."""
    if count >= 2**30:
        return f"{count / 2**30:.2f} GiB"
    if count >= 2**20 or not count:
        return f"{count / 2**20:.0f} MiB"
    return f"{count / 2**10:.0f} KiB" if count >= 2**10 else f"{count:.0f} B"


def count_name(count: float) -> str:
    """A count in short form: 8.03B, 135M, 4.2k."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:.3g}"


def first_steps(count: int) -> str:
    """`the first step`, `the first 3 steps`."""
    return "the first step" if count == 1 else f"the first {count:,} steps"


def print_fields(rows: "list[FieldRow]", *, as_json: bool) -> None:
    """Every field of a job file."""
    if as_json:
        return print_json([asdict(row) for row in rows])
    table = Table("field", "default", "meaning", title="Fields of a job file", title_justify="left")
    for row in rows:
        table.add_row(row.path, escape(row.default), escape(f"{row.meaning} ({row.type})"))
    Console().print(table)


def model_facts(spec: ModelSpec) -> dict[str, Any]:
    """The sizes of a model that people compare."""
    return {
        "params": spec.params(),
        "active_params": spec.params(active=True),
        "layers": spec.layers,
        "hidden_size": spec.hidden_size,
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "mlp_size": spec.experts.mlp_size if spec.experts else spec.mlp_size,
        "experts": f"{spec.experts.per_token}/{spec.experts.count}" if spec.experts else None,
        "vocab_size": spec.vocab_size,
        "max_positions": spec.max_positions,
        "bf16_bytes": 2 * spec.params(),
    }


def print_models(specs: Mapping[str, ModelSpec], *, as_json: bool) -> None:
    """The presets with their sizes."""
    if as_json:
        return print_json({name: {"family": spec.family, **model_facts(spec)} for name, spec in specs.items()})
    table = Table(title="Model presets", title_justify="left", box=None, padding=(0, 1))
    table.add_column("preset", no_wrap=True)
    for column in ("parameters", "layers", "hidden", "heads/kv", "experts", "positions", "bf16"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, spec in specs.items():
        experts = f"{spec.experts.per_token} of {spec.experts.count}" if spec.experts else ""
        table.add_row(
            name,
            f"{spec.params():,}",
            str(spec.layers),
            str(spec.hidden_size),
            f"{spec.heads}/{spec.kv_heads}",
            experts,
            f"{spec.max_positions:,}",
            gib(2 * spec.params()),
        )
    Console(width=100).print(table)


def print_model(name: str, spec: ModelSpec, *, as_json: bool) -> None:
    """Everything a spec says about one model."""
    if as_json:
        return print_json({"name": name, **asdict(spec), **model_facts(spec)})
    facts = {**model_facts(spec), **{k: v for k, v in asdict(spec).items() if v not in (None, False, (), 1.0)}}
    print_pairs(name, facts)


def print_evaluation(result: "Evaluation", *, as_json: bool) -> None:
    """Print loss, perplexity and the number of tokens evaluated."""
    facts = {"loss": result.loss, "perplexity": result.perplexity, "tokens": result.tokens}
    if as_json:
        return print_json(facts)
    print_pairs(
        "held-out", {**facts, "loss": f"{result.loss:.4f} nats/token", "perplexity": f"{result.perplexity:.4f}"}
    )


def print_export(result: "Export", *, as_json: bool) -> None:
    """Where a model was written and how large it is."""
    if as_json:
        return print_json(asdict(result))
    output_console().print(
        f"wrote {escape(str(result.path))} ({count_name(result.params)} parameters, {gib(result.bytes)})"
    )
    if result.transformers_limit:
        print(limit_sentence(result.transformers_limit))


def limit_sentence(limit: str) -> str:
    """What is said of codes that transformers does not load."""
    return f"tightfit will load it, transformers 5.23 not: {limit}"


def print_samples(prompt: str, streams: Iterable[Iterable[str]], *, as_json: bool) -> None:
    """Stream continuations, or print all of them as JSON."""
    if as_json:
        return print_json({"prompt": prompt, "continuations": ["".join(stream) for stream in streams]})
    for number, stream in enumerate(streams):
        print("\n---\n" * (number > 0), end="")
        for piece in stream:
            print(printable(piece), end="", flush=True)
    print()


def print_pairs(title: str, facts: Mapping[str, Any]) -> None:
    """A name and its value on each line, without those that are None."""
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in facts.items():
        if value is None:
            continue
        table.add_row(name, escape(_value(value)))
    Console().print(table)


def _value(value: Any) -> str:
    """Numbers with thousands apart; settings and lists as a person writes them, and of long lists the length."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_value(each)}" for name, each in value.items() if each not in (None, False, ()))
    if isinstance(value, list | tuple):
        if all(isinstance(each, tuple) and isinstance(each[0], str) for each in value):  # a frozen mapping
            return _value(dict(value))
        is_long = len(value) > SHOWN_NUMBERS and isinstance(value[0], float)
        return f"{len(value)} numbers" if is_long else ", ".join(map(_value, value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{int(value):,}" if value == int(value) else f"{value:.6g}"
