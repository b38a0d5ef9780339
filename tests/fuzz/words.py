"""Cases of what users type: job files, overrides, pins, machines, sizes, names of models and of data."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.fuzz.changing import changed_bytes, changed_value, number, word
from tests.fuzz.materials import JOB, Materials
from tightfit.compress.recipe import read_recipe
from tightfit.hardware.machine import parse_machine
from tightfit.hardware.own_card import own_card
from tightfit.hardware.sizes import parse_bytes, parse_count
from tightfit.jobs.load import load_job, parse_job
from tightfit.models.loading import has_weights, load_model, source_spec
from tightfit.models.resolve import reshaped, resolve_spec
from tightfit.plan.search.pins import parse_pins
from tightfit.train.data.sources import find_sources

Case = Callable[[], object]
SNIPPETS = (
    "&a [*a]",
    "a0: &a0 [x,x,x,x,x,x,x,x,x]\na1: &a1 [*a0,*a0,*a0,*a0,*a0,*a0,*a0,*a0]\na2: [*a1,*a1,*a1,*a1]\n",
    "!!timestamp x",
    "!!int ''",
    "!!binary =",
    "!!set {a, b}",
    "!!omap [a: 1]",
    "? [1, 2]\n: 3\n",
    "<<: {a: 1}\n",
    "1:59:59",
    "2001-01-01",
    "0o17",
    "1_000",
    ".inf",
    ".nan",
    "- - - -",
    "|\n  text",
    ">-\n  x",
    "%YAML 9.9\n---\n",
    "---\na\n---\nb",
    "[" * 300,
    "{" * 300,
    '"\\x1b[31m"',
    '"\\0"',
    "\t",
    "@",
    "`",
    "*nothing",
    "!!python/name:os.system",
)
CARDS = ("H100-80GB", "V100-32GB", "H200", "A100-80GB", "T4", "local", "cpu", "B300", "x", "80GB", "")


def job_file(chance: random.Random, given: Materials, folder: Path) -> Case:
    """A job file with values, or bytes, that are wrong."""
    if chance.random() < 0.5:
        try:
            text = yaml.safe_dump(changed_value(chance, JOB, chance.choice((1, 2, 5))), allow_unicode=True)
        except (RecursionError, ValueError, yaml.YAMLError):
            text = "[" * 3000
        content = text.encode("utf-8", "surrogatepass")
    else:
        lines = given.job_text.splitlines()
        lines.insert(chance.randrange(len(lines)), chance.choice(SNIPPETS))
        content = "\n".join(lines).encode()
    path = folder / "job.yaml"
    path.write_bytes(changed_bytes(chance, content) if chance.random() < 0.3 else content)
    return lambda: load_job(path)


def override(chance: random.Random, given: Materials, folder: Path) -> Case:
    """`-o` with fields and values that are wrong."""
    fields = [
        "steps",
        "optimizer.lr",
        "model.shape.layers",
        "data.train",
        "data.held_out",
        "output",
        "layout.zero",
        "a.b",
    ]
    made = [f"{chance.choice([*fields, word(chance)])}={_text(chance)}" for _ in range(chance.randrange(1, 4))]
    return lambda: parse_job(given.job_text, "job.yaml", made)


def pin(chance: random.Random, given: Materials, folder: Path) -> Case:
    """`tightfit plan -o`."""
    fields = ("layout.zero", "layout.tensor", "layout.micro_batch", "levers.offload", "levers.tiles", "levers.x", "x")
    made = [f"{chance.choice(fields)}={_text(chance)}"]
    return lambda: parse_pins(made)


def machine(chance: random.Random, given: Materials, folder: Path) -> Case:
    """`--on`."""
    counts = [f"{number(chance)}x" for _ in range(chance.randrange(3))]
    text = "".join(counts) + chance.choice(CARDS) + chance.choice(("", ":pcie", ":hdr", f":{word(chance)}"))
    host = chance.choice((None, "512GB", word(chance), f"{number(chance)}GB"))
    return lambda: parse_machine(text, host)


def size(chance: random.Random, given: Materials, folder: Path) -> Case:
    """Sizes and counts."""
    text = chance.choice(
        (f"{number(chance)}GB", f"{number(chance)}M", word(chance), "9" * chance.choice((20, 400)) + "TB")
    )
    return lambda: (parse_bytes if chance.random() < 0.5 else parse_count)(text, "--size")


def model_name(chance: random.Random, given: Materials, folder: Path) -> Case:
    """A model that is not there, or not a model."""
    text = chance.choice(
        (word(chance), "llama-3.1-8b" + word(chance), str(folder), str(folder / word(chance).strip("/")))
    )
    uses: tuple[Callable[[str], object], ...] = (resolve_spec, load_model, source_spec, has_weights)
    return lambda: chance.choice(uses)(text)


def shape(chance: random.Random, given: Materials, folder: Path) -> Case:
    """`model.shape` of a job."""
    names = (
        "layers",
        "hidden_size",
        "heads",
        "kv_heads",
        "head_dim",
        "vocab_size",
        "tied",
        "max_positions",
        "rope",
        "x",
    )
    changes: dict[str, Any] = {chance.choice(names): value for value in [number(chance)] if isinstance(value, int)}
    return lambda: reshaped(resolve_spec("tiny-llama"), changes, "tiny-llama").params()


def data_name(chance: random.Random, given: Materials, folder: Path) -> Case:
    """`data.train`."""
    (folder / "x.txt").write_text("x")
    names = [chance.choice((word(chance), str(folder), str(folder / "x.txt"), "/dev", "/dev/zero"))]
    return lambda: find_sources(names, rows_only=chance.random() < 0.5)


def recipe(chance: random.Random, given: Materials, folder: Path) -> Case:
    """Steps of `tightfit compress`."""
    steps = [{"method": "gptq", "bits": 4, "group": 64, "layers": "*.mlp.*"}, {"method": "keep", "layers": ["a", "b"]}]
    path = _yaml_file(chance, steps, folder)
    return lambda: read_recipe(path)


def card(chance: random.Random, given: Materials, folder: Path) -> Case:
    """A card of one's own."""
    row = {"family": "x", "memory_gb": 40, "bandwidth_gb_s": 900, "fp32": 30, "bf16": 9, "host_link": "pcie4"}
    path = _yaml_file(chance, {**row, "peer_link": "pcie4"}, folder)
    return lambda: own_card(path)


def _yaml_file(chance: random.Random, whole: Any, folder: Path) -> Path:
    """A file with values, lines or bytes that are wrong."""
    try:
        text = yaml.safe_dump(changed_value(chance, whole, chance.choice((0, 1, 2))), allow_unicode=True)
    except (RecursionError, ValueError, yaml.YAMLError):
        text = "[" * 3000
    if chance.random() < 0.5:
        lines = text.splitlines()
        lines.insert(chance.randrange(len(lines) + 1), chance.choice(SNIPPETS))
        text = "\n".join(lines)
    content = text.encode("utf-8", "surrogatepass")
    path = folder / "steps.yaml"
    path.write_bytes(changed_bytes(chance, content) if chance.random() < 0.3 else content)
    return path


def _text(chance: random.Random) -> str:
    return chance.choice((word(chance), str(number(chance)), chance.choice(SNIPPETS)))


KINDS = {
    "job file": job_file,
    "override": override,
    "pin": pin,
    "machine": machine,
    "size": size,
    "model name": model_name,
    "model shape": shape,
    "data name": data_name,
    "recipe": recipe,
    "card": card,
}
