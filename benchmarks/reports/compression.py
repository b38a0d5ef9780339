"""Tables of docs/compressing.md: quality beside other packages, mixes of bits, what compressing takes, served speed."""

import csv
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tightfit.compress.cost import predict
from tightfit.compress.recipe import recipe_of
from tightfit.memory.ledger import Phase
from tightfit.models.presets import preset

Row = dict[str, str]
Table = tuple[Sequence[str], Sequence[Sequence[str]]]
LEAST_ROWS = 8
"""Of a table: fewer rows over other windows are trials."""
PACKAGES = {"gptqmodel": "GPTQModel", "hqq": "HQQ", "auto-round": "AutoRound"}
COMPRESSING: tuple[Phase, ...] = ("load", "forward", "coding")
SERVED = {
    "one_stream_decode": "one stream",
    "batch": "64 × (256 in + 256 out)",
    "prefill": "prefill, 16 × 4096",
    "mixed": "256 mixed requests",
}


def read_rows(path: Path) -> list[Row]:
    """All rows of a file of results; none where it is not there yet."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def quality_measured(path: Path, length: int) -> list[Row]:
    """The newest row of every method over the most windows of this length that a whole table was measured over."""
    rows = [row for row in read_rows(path) if row["length"] == str(length) and row["loss_difference"]]
    counts = Counter(int(row["windows"]) for row in rows)
    whole = [windows for windows, found in counts.items() if found >= LEAST_ROWS]
    if not whole:
        return []
    return list({_key(row): row for row in rows if int(row["windows"]) == max(whole)}.values())


def _key(row: Row) -> tuple[str, str, str]:
    return row["package"], row["method"], row["scheme"]


def quality_rows(path: Path, length: int) -> Table:
    """Every method and package, by width and then by perplexity."""
    rows = quality_measured(path, length)
    rows.sort(key=lambda row: (-int(row["bits"]), float(row["perplexity"])))
    made = [
        (
            row["bits"],
            f"`{row['method']}`" if row["package"] == "tightfit" else row["method"],
            row["scheme"],
            PACKAGES.get(row["package"], row["package"]),
            f"{float(row['bits_per_weight']):.2f}",
            f"{float(row['perplexity']):.2f}",
            f"{float(row['loss_difference']):.3f} ± {float(row['loss_difference_half_width']):.3f}",
            f"{float(row['kl']):.4f}",
            row["calibration"],
        )
        for row in rows
    ]
    return ("bits", "method", "numbers", "package", "bits a weight", "perplexity", "Δ loss", "KL", "calibrated"), made


def fewer_windows_rows(path: Path, lengths: Sequence[int]) -> Table:
    """Methods that are not in the tables of these lengths, over as many windows as they were measured; not static.

    Beside others' stands our best in the same numbers over the same windows.
    """
    found = []
    for length in lengths:
        known = {_key(row) for row in quality_measured(path, length)}
        rows = [row for row in read_rows(path) if row["length"] == str(length) and row["loss_difference"]]
        rows = [row for row in rows if not _is_of_rounded_inputs(row)]
        shown = {_key(row): row for row in rows if _key(row) not in known}
        found += [(row, _ours_beside(row, rows)) for row in shown.values()]
    made = [
        (
            row["bits"],
            f"`{row['method']}`" if row["package"] == "tightfit" else row["method"],
            row["scheme"],
            PACKAGES.get(row["package"], row["package"]),
            f"{float(row['bits_per_weight']):.2f}",
            f"{row['windows']} × {row['length']}",
            f"{float(row['perplexity']):.2f}",
            f"{float(row['original_perplexity']):.2f}",
            f"{float(row['kl']):.4f}",
            "" if ours is None else f"{ours['method']}: {float(ours['perplexity']):.2f}, {float(ours['kl']):.4f}",
            row["calibration"],
        )
        for row, ours in sorted(found, key=lambda pair: (-int(pair[0]["bits"]), int(pair[0]["length"])))
    ]
    header = ("bits", "method", "numbers", "package", "bits a weight", "windows", "perplexity", "the original's", "KL")
    return (*header, "ours in the same numbers: perplexity, KL", "calibrated"), made


def _is_of_rounded_inputs(row: Row) -> bool:
    """One of the table of static scales."""
    return "int8 activations)" in row["scheme"] and "llm.int8" not in row["scheme"]


def _ours_beside(row: Row, rows: Sequence[Row]) -> Row | None:
    """Our best in the numbers of another package's row, over its windows."""
    if row["package"] == "tightfit":
        return None
    alike = [each for each in rows if all(each[name] == row[name] for name in ("scheme", "windows"))]
    newest = {_key(each): each for each in alike if each["package"] == "tightfit"}
    return _best(newest.values())


def quality_text(path: Path, length: int) -> str:
    """What the table was measured over."""
    rows = quality_measured(path, length)
    if not rows:
        return f"Windows of {length} have not been measured yet."
    first, devices = rows[0], sorted({row["device"] for row in rows})
    return (
        f"{int(first['windows'])} windows of {length} tokens on {' and '.join(devices)}; the original has perplexity "
        f"{float(first['original_perplexity']):.2f}."
    )


def ahead_rows(path: Path, length: int) -> Table:
    """At every width the best of the others, and our best that is no larger; types that lose nothing are left out.

    Judged by the divergence from the original: close to it, perplexity is lower or higher by chance.
    """
    rows = [row for row in quality_measured(path, length) if float(row["kl"]) > 0]
    made = []
    for bits in sorted({int(row["bits"]) for row in rows}, reverse=True):
        others = _best(row for row in rows if int(row["bits"]) == bits and row["package"] != "tightfit")
        if others is None:
            continue
        most = float(others["bits_per_weight"])
        ours = _best(row for row in rows if row["package"] == "tightfit" and float(row["bits_per_weight"]) <= most)
        if ours is not None:
            made.append((str(bits), _told(ours), _told(others), f"{float(others['kl']) / float(ours['kl']):.2f}"))
    return ("bits", "our best of no more bytes", "the best of the others", "their KL, ours being 1"), made


def same_numbers_rows(path: Path, length: int) -> Table:
    """Of all numbers that both have, in one layout of the same bytes: our best method beside the others' best."""
    rows = [row for row in quality_measured(path, length) if float(row["kl"]) > 0]
    made = []
    for _, scheme in sorted({(-int(row["bits"]), row["scheme"]) for row in rows}):
        alike = [row for row in rows if row["scheme"] == scheme]
        others = _best(row for row in alike if row["package"] != "tightfit")
        ours = _best(row for row in alike if row["package"] == "tightfit")
        if others is None or ours is None:
            continue
        sizes = f"{float(ours['bits_per_weight']):.2f}"
        if others["bits_per_weight"] != ours["bits_per_weight"]:
            sizes += f", theirs {float(others['bits_per_weight']):.2f}"
        told = (
            f"{row['method']}{_by(row)}: {float(row['perplexity']):.2f}, {float(row['kl']):.4f}"
            for row in (ours, others)
        )
        made.append((scheme, sizes, *told))
    return ("the same numbers", "bits a weight", "our best: perplexity, KL", "the best of the others"), made


def _by(row: Row) -> str:
    """Whose row it is, in brackets, where it is not ours."""
    return "" if row["package"] == "tightfit" else f" ({PACKAGES.get(row['package'], row['package'])})"


def _best(rows: Iterable[Row]) -> Row | None:
    return min(rows, key=lambda row: float(row["kl"]), default=None)


def _told(row: Row) -> str:
    size, loss = float(row["bits_per_weight"]), f"perplexity {float(row['perplexity']):.2f}, KL {float(row['kl']):.4f}"
    return f"{row['method']} {row['scheme']}{_by(row)}, {size:.2f} bits a weight: {loss}"


def nearest_rows(path: Path) -> Table:
    """Rounding to nearest as we make it now beside torchao's over the same windows, at every width."""
    rows = [row for row in read_rows(path) if _is_nearest(row)]
    others = {(row["bits"], row["windows"]): row for row in rows if row["package"] == "torchao"}
    newest = {
        int(row["bits"]): (row, others[at])
        for row in rows
        if row["package"] == "tightfit" and (at := (row["bits"], row["windows"])) in others
    }
    made = []
    for bits, (ours, theirs) in sorted(newest.items(), reverse=True):
        numbers = [float(row["perplexity"]) for row in (ours, theirs)]
        divergences = [f"{float(row['kl']):.4f}" for row in (ours, theirs)]
        shares = f"{numbers[0] / numbers[1] - 1:+.1%}"
        made.append((str(bits), *(f"{number:.2f}" for number in numbers), shares, *divergences, ours["windows"]))
    return ("bits", "rtn", "torchao's", "difference", "KL", "torchao's", "windows of 512"), made


def _is_nearest(row: Row) -> bool:
    is_plain = row["method"] == "rtn" and row["scheme"] == f"int{row['bits']} g64 asym"
    return is_plain and row["length"] == "512" and bool(row["loss_difference"])


def static_measured(path: Path) -> list[Row]:
    """Ours with rounded inputs in windows of 512, over as many windows as most of the static ones."""
    rows = [row for row in read_rows(path) if row["length"] == "512" and "int8 activations)" in row["scheme"]]
    rows = [row for row in rows if row["package"] == "tightfit" and row["method"].startswith(("rtn", "smoothquant"))]
    counts = Counter(row["windows"] for row in rows if "static" in row["scheme"])
    most = max(counts, key=lambda windows: (counts[windows], int(windows)), default=None)
    return list({_key(row): row for row in rows if row["windows"] == most}.values())


def static_rows(path: Path) -> Table:
    """8-bit weights and inputs: a scale per token beside one scale a layer by every rule."""
    made = []
    for row in sorted(static_measured(path), key=lambda row: (row["method"], float(row["perplexity"]))):
        _, _, rule = row["scheme"].partition("static int8 activations), ")
        loss = f"{float(row['loss_difference']):.3f} ± {float(row['loss_difference_half_width']):.3f}"
        shown = (f"{float(row['perplexity']):.2f}", loss, f"{float(row['kl']):.4f}", f"{float(row['agreement']):.1%}")
        made.append((f"`{row['method']}`", f"static, {rule}" if rule else "per token", *shown))
    return ("method", "scales of inputs", "perplexity", "Δ loss", "KL", "same first choice"), made


def static_text(path: Path) -> str:
    """What the table was measured over."""
    rows = static_measured(path)
    if not rows:
        return "Static scales have not been measured yet."
    calibrated = sorted({row["calibration"] for row in rows if row["calibration"] != "no data"})
    return (
        f"{rows[0]['windows']} windows of 512 tokens, calibrated on {' and '.join(calibrated)}; the original has "
        f"perplexity {float(rows[0]['original_perplexity']):.2f}."
    )


def mixes_measured(path: Path) -> list[Row]:
    """Every mix of the newest measurement."""
    rows = read_rows(path)
    return [row for row in rows if (row["commit"], row["test"]) == (rows[-1]["commit"], rows[-1]["test"])]


def mix_text(path: Path) -> str:
    """How far the predictions of the newest measurement are off."""
    rows = mixes_measured(path)

    def errors(what: str) -> str:
        found = [abs(float(row[f"predicted_{what}"]) / float(row[f"measured_{what}"]) - 1) for row in rows]
        return f"{sum(found) / len(found):.1%} on average and {max(found):.1%} at worst"

    first = rows[0]
    return (
        f"{len(rows)} mixes, sensitivities of {first['calibration']} tokens, measured on {first['test']} others "
        f"({first['device']}): perplexity is off by {errors('perplexity')}, KL by {errors('kl')}."
    )


def mix_rows(path: Path) -> Table:
    """Predicted beside measured of every mix, of the newest measurement."""
    newest = mixes_measured(path)
    made = [
        (
            row["mix"],
            f"{float(row['bits_per_weight']):.2f}",
            f"{float(row['predicted_kl']):.3f}",
            f"{float(row['measured_kl']):.3f}",
            f"{float(row['predicted_perplexity']):.1f}",
            f"{float(row['measured_perplexity']):.1f}",
        )
        for row in newest
    ]
    return ("mix", "bits a weight", "predicted KL", "measured KL", "predicted perplexity", "measured perplexity"), made


def gptq_mix_rows(path: Path) -> Table:
    """One width for all beside what `--fit` chooses within its bytes, both coded by GPTQ."""
    newest = {row["mix"]: row for row in read_rows(path)}
    pairs = [
        (row, newest[mix])
        for name, row in newest.items()
        if name.startswith("uniform ") and (mix := name.replace("uniform", "chosen as")) in newest
    ]
    made = [
        (
            same["mix"].removeprefix("uniform "),
            f"{float(same['bits_per_weight']):.2f}",
            *(cell for row in (same, mix) for cell in (f"{float(row['perplexity']):.2f}", _with_interval(row))),
        )
        for same, mix in sorted(pairs, key=lambda pair: float(pair[0]["bits_per_weight"]))
    ]
    return ("for all", "bits a weight", "perplexity", "KL", "chosen by `--fit`: perplexity", "KL"), made


def head_rows(path: Path) -> Table:
    """What coding the output projection costs, beside layers as they were and coded."""
    newest = {(row["layers"], row["head"]): row for row in read_rows(path)}
    made = [(*key, f"{float(row['perplexity']):.2f}", _with_interval(row)) for key, row in newest.items()]
    return ("layers", "output projection", "perplexity", "KL"), made


def _with_interval(row: Row) -> str:
    return f"{float(row['measured_kl']):.4f} ± {float(row['kl_half_width']):.4f}"


def measured_over(path: Path) -> str:
    """The text of a table of recipes (recipe_bench.py)."""
    rows = read_rows(path)
    if not rows:
        return "Not measured yet."
    last = rows[-1]
    return (
        f"Calibrated on {last['calibration']} tokens, measured on {last['test']} others ({last['device']}); the "
        f"original has perplexity {float(last['original_perplexity']):.2f}."
    )


def cost_rows(path: Path) -> Table:
    """Seconds and memory of compressing, as predicted and as measured."""
    made = [
        (
            row["model"],
            row["recipe"],
            row["calibration"],
            f"{float(row['seconds']):.0f} s",
            f"{int(row['predicted_bytes']) / 2**30:.1f} GiB",
            f"{int(row['measured_bytes']) / 2**30:.1f} GiB",
            row["device"],
        )
        for row in read_rows(path)
    ]
    return ("model", "recipe", "tokens", "took", "memory, predicted", "measured", "on"), made


def predicted_cost_rows(models: Sequence[str] = ("llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b")) -> Table:
    """The ledger of GPTQ in 4 bits on 128 × 2048 tokens, for presets."""
    recipe, made = recipe_of("gptq", bits=4, group=128), []
    for name in models:
        ledger = predict(preset(name), recipe, 128, 2048).ledger
        assert ledger is not None
        phases = [f"{ledger.allocated_bytes(phase) / 2**30:.1f} GiB" for phase in COMPRESSING]
        made.append((name, *phases, f"{ledger.peak_allocated_bytes() / 2**30:.1f} GiB"))
    return ("model", "embedding", "forward passes", "coding", "peak"), made


def served_rows(path: Path, model: str = "8b") -> Table:
    """Tokens a second of the server: the newest row of every number format and case, and the commit of each."""
    rows = [row for row in read_rows(path) if row["model"] == model]
    made = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        of_format = [row for row in rows if row["dtype"] == dtype]
        newest, apart = {row["case"]: row for row in of_format}, commits_apart(of_format)
        cells = [_served(newest.get(case), apart.get(case)) for case in SERVED]
        made.append((dtype, *cells, f"`{of_format[-1]['commit']}`"))
    return ("weights", *SERVED.values(), "commit, where none is named"), made


def commits_apart(rows: Sequence[Row]) -> dict[str, str]:
    """The commits of those cases whose newest row is of another commit than the last of `rows`."""
    newest = {row["case"]: row["commit"] for row in rows}
    return {case: commit for case, commit in newest.items() if commit != rows[-1]["commit"]}


def _served(row: Row | None, commit: str | None) -> str:
    if row is None:
        return "–"
    return f"{float(row['value']):,.0f}{'' if commit is None else f' (`{commit}`)'}"
