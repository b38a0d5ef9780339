"""What the page says of the engine on a CPU is what was measured last."""

import csv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAID = {
    ("one stream", "fp32", "transformers, one by one"): "| `transformers` generate, float32 | 1 | {} |",
    ("16 requests", "fp32", "transformers, one by one"): "| the same, one after the other | 16 of mixed lengths | {} |",
    ("16 requests", "fp32", "transformers, padded batch"): "| the same, one padded batch | 16 of mixed lengths | {} |",
    ("one stream", "fp32", "llama.cpp"): "| llama.cpp, fp32 file (we read 16 bits) | 1 | {} |",
    ("one stream", "fp16", "llama.cpp"): "| llama.cpp, fp16 file | 1 | {} |",
    ("one stream", "q8_0", "llama.cpp"): "| llama.cpp, q8_0 file (we read 16 bits) | 1 | {} |",
    ("one stream", "q4_0", "llama.cpp"): "| llama.cpp, q4_0 file (we multiply 4 bits) | 1 | {} |",
    (
        "one stream",
        "q4_0",
        "transformers, one by one",
    ): "| `transformers`, the q4_0 file's numbers in float32 | 1 | {} |",
    (
        "16 requests",
        "q4_0",
        "transformers, one by one",
    ): "| the same beside 4 bits, one after the other | 16 of mixed lengths | {} |",
    (
        "16 requests",
        "q4_0",
        "transformers, padded batch",
    ): "| the same beside 4 bits, one padded batch | 16 of mixed lengths | {} |",
}


ON_ARM = {
    ("one stream", "fp32", "transformers, one by one"): "| `transformers` generate, float32 | 1 | {} |",
    ("16 requests", "fp32", "transformers, one by one"): "| the same, one after the other | 16 of mixed lengths | {} |",
    ("16 requests", "fp32", "transformers, padded batch"): "| the same, one padded batch | 16 of mixed lengths | {} |",
    (
        "one stream",
        "q4_0",
        "transformers, one by one",
    ): "| `transformers`, the q4_0 file's numbers in float32 | 1 | {} |",
    ("one stream", "fp32", "llama.cpp"): "| llama.cpp, fp32 file | 1 | {} |",
    ("one stream", "fp16", "llama.cpp"): "| llama.cpp, fp16 file | 1 | {} |",
    ("one stream", "q8_0", "llama.cpp"): "| llama.cpp, q8_0 file | 1 | {} |",
    ("one stream", "q4_0", "llama.cpp"): "| llama.cpp, q4_0 file | 1 | {} |",
}
"""Of processor time."""


@pytest.mark.parametrize(
    ("device", "said", "ratio"),
    [("x86_64 CPU", SAID, "ratio"), ("aarch64 CPU", ON_ARM, "processor_ratio")],
)
def test_the_page_has_the_newest_ratios(device: str, said: dict[tuple[str, str, str], str], ratio: str) -> None:
    with (ROOT / "benchmarks/results/serve_cpu.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["device"] == device]
    newest = {(row["case"], row["weights"], row["peer"]): row for row in rows}
    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    for key, line in said.items():
        assert line.format(newest[key][ratio]) in page
    exact = [row for (_, weights, peer), row in newest.items() if peer.startswith("transformers") and weights == "fp32"]
    assert len(exact) == 3
    assert all(row["agreeing"] == row["requests"] for row in exact)
    assert newest["one stream", "fp32", "llama.cpp"]["agreeing"] == "1"
