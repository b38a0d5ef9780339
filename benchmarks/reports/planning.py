"""Tables of docs/hardware.md and docs/planning.md, made from the catalog, the efficiencies and the planner itself."""

import csv
from collections.abc import Sequence
from pathlib import Path

from tightfit.hardware.accelerator import Number
from tightfit.hardware.catalog import CATALOG, find_accelerator
from tightfit.hardware.efficiency import MEASURED
from tightfit.hardware.links import COLLECTIVE_SHARE, HOP_US, LINKS
from tightfit.hardware.machine import parse_machine
from tightfit.hardware.sustained import generation_of, product_share
from tightfit.jobs.lever_table import describe_levers
from tightfit.models.resolve import resolve_spec
from tightfit.plan.answer import Question, answer, make_workload
from tightfit.plan.describe import describe_layout

Rows = tuple[Sequence[str], Sequence[Sequence[str]]]
SUSTAINED = (
    ("V100-32GB", "sxm"),
    ("T4", None),
    ("A100-80GB", "sxm"),
    ("A100-80GB", "pcie"),
    ("A10", None),
    ("RTX3090", None),
    ("L4", None),
    ("L40S", None),
    ("RTX4090", None),
    ("H100-80GB", "sxm"),
    ("H100-80GB", "pcie"),
    ("H200", "sxm"),
    ("B200", None),
    ("RTX5090", None),
    ("MI300X", None),
)
EXAMPLES = (
    ("llama-3.2-1b", "8xA100-80GB", 4096, 256),
    ("llama-3.1-8b", "8xV100-32GB", 512, 8),
    ("llama-3.1-8b", "4xV100-32GB", 512, 8),
    ("llama-3.1-8b", "H100-80GB", 4096, 8),
    ("llama-3.1-8b", "4xA100-80GB", 8192, 32),
    ("llama-2-13b", "4xA100-80GB:pcie", 4096, 64),
    ("llama-3.1-70b", "16x8xL40S:ethernet-100", 4096, 256),
    ("mixtral-8x7b", "4x8xH100-80GB", 4096, 1024),
    ("llama-3.1-405b", "128x8xH100-80GB", 8192, 2048),
)


def accelerator_rows() -> Rows:
    """The catalog."""
    header = (
        "name",
        "form",
        "usable GiB",
        "GB/s",
        "fp32",
        "tf32",
        "fp16",
        "bf16",
        "fp8",
        "int8",
        "between cards",
        "to the host",
        "source",
    )
    rows = []
    for card in CATALOG:
        rates = (card.rates.fp32, card.rates.tf32, card.rates.fp16, card.rates.bf16, card.rates.fp8, card.rates.int8)
        shown = [f"{rate:g}" if rate else "–" for rate in rates]
        usable = f"{card.memory_bytes / 2**30:.1f}" + ("" if card.usable_gib else " (vendor's)")
        note = f"; {card.note}" if card.note else ""
        rows.append(
            (
                card.name,
                card.form,
                usable,
                f"{card.bandwidth_gb_s:g}",
                *shown,
                card.peer_link,
                card.host_link,
                card.source + note,
            )
        )
    return header, rows


def link_rows() -> Rows:
    """The links, with what collectives are taken to reach of them."""
    rows = [
        (
            link.name,
            f"{link.gb_s:g}",
            f"{link.collective_bytes_s / 1e9:.3g}",
            f"{HOP_US[link.kind]:g}",
            "node" if link.per_node else "card",
            f"{COLLECTIVE_SHARE[link.kind]:.0%}",
        )
        for link in LINKS.values()
    ]
    return ("link", "GB/s one way", "in collectives", "µs a hop", "one per", "share"), rows


def efficiency_rows() -> Rows:
    """The measured shares in 16 bits: of attention those of a training step, at long sequences."""
    attention = MEASURED.narrow.attention
    shares = [
        ("matrix products", MEASURED.matmul),
        *((f"attention forward, heads of {size}", share) for size, share in attention.forward),
        *((f"attention backward, heads of {size}", share) for size, share in attention.backward),
        ("memory bandwidth", MEASURED.bandwidth),
    ]
    return ("what", "share of the data sheet"), [(name, f"{share:.1%}") for name, share in shares]


def example_rows(examples: Sequence[tuple[str, str, int, int]] = EXAMPLES) -> Rows:
    """Questions people ask, and the planner's answers."""
    rows = []
    for model, on, seq, batch in examples:
        machine = parse_machine(on)
        workload = make_workload(resolve_spec(model), machine, sequence_length=seq, rows=batch)
        plan = answer(Question(model=model, workload=workload, machine=machine)).plan
        memory = f"{plan.gpu_peak_bytes / 2**30:.0f} of {machine.accelerator.memory_bytes / 2**30:.0f} GiB"
        asked = f"`{model} --on {on} --seq {seq} --global-batch {batch}`"
        rows.append(
            (asked, describe_layout(plan.layout), describe_levers(plan.levers), memory, f"{plan.step_seconds:.2g} s")
        )
    return ("question", "layout", "levers", "memory a GPU", "step"), rows


def sustained_rows() -> Rows:
    """Of each generation's best-known cards, what products sustain."""
    rows = []
    for name, form in SUSTAINED:
        card = find_accelerator(name, form)
        number: Number = "bf16" if card.rates.bf16 else "fp16"
        peak = card.rates.of(number) or 0.0
        share = product_share(card, peak)
        rows.append((card.name, card.form, generation_of(card), f"{card.power_w:g} W", f"{peak:g}", f"{share:.0%}"))
    return ("card", "form", "generation", "power", "peak TFLOP/s", "products sustain"), rows


def export_rows(path: Path) -> Rows:
    """Each export and package: the newest row of every machine, from what benchmarks/export_checks.py wrote."""
    with path.open(encoding="utf-8", newline="") as file:
        newest = {(row["export"], row["package"], row["machine"]): row for row in csv.DictReader(file)}
    rows = []
    for kind, package in dict.fromkeys((kind, package) for kind, package, _ in newest):
        found = [row for (of, by, _), row in newest.items() if (of, by) == (kind, package)]
        versions = ", ".join(dict.fromkeys(row["version"] for row in found))
        verdicts = "; ".join(dict.fromkeys(row["verdict"] for row in found))
        read = "; ".join(dict.fromkeys(row["found"] for row in found))
        rows.append((f"`{kind}`", f"{package} {versions}", f"{verdicts}: {read}"))
    return ("export", "read by", "which"), sorted(rows)
