"""What the page says speculation gains is what was measured last, and forced guesses are kept as often as one says."""

import csv
import random
from pathlib import Path

import torch

from benchmarks.serve_speculation import Spoiled
from tightfit.serve.requests.sampling import Sampling
from tightfit.serve.schedule.scheduler import Chunk
from tightfit.serve.schedule.sequence import Sequence

ROOT = Path(__file__).parents[2]
WAYS = {"lookup": "`--lookup`", "skip 10": "`--skip 10`", "draft -10": "a draft of the 20 layers left"}
KINDS = {"repeating": "code to say again", "open": "open questions"}


def test_the_page_has_the_newest_rows() -> None:
    with (ROOT / "benchmarks/results/serve_speculation.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if not row["forced_keep"]]
    newest = {(row["way"], row["prompts"], row["streams"]): row for row in rows}
    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    for (way, kind, streams), row in newest.items():
        if way in WAYS:
            kept = f"{float(row['kept_share'] or 0):.1%}"
            assert f"| {WAYS[way]} | {KINDS[kind]} | {streams} | {kept} | {row['processor_ratio']} |" in page
    assert {way for way, _, _ in newest} == {"plain", *WAYS}
    assert all(row["agreeing"] == row["requests"] for row in rows)


def test_guesses_are_spoiled_as_often_as_one_says() -> None:
    class Sure:
        """Guesses token 5, of which it is certain."""

        def propose(self, chunks: list[Chunk]) -> dict[Sequence, torch.Tensor]:
            for chunk in chunks:
                chunk.proposal = [5] * 100
            return {chunk.sequence: torch.eye(8)[[5] * 100].clone() for chunk in chunks}

    chunks = [Chunk(Sequence([1], Sampling()), 0, 1, 100) for _ in range(40)]
    drawn = Spoiled(Sure(), 0.7, 8).propose(chunks)  # type: ignore[arg-type]
    left = sum(chunk.proposal.count(5) for chunk in chunks)
    assert abs(left / 4000 - 0.7) < 5 * (0.21 / 4000) ** 0.5
    for chunk in random.Random(0).sample(chunks, 5):
        assert drawn[chunk.sequence].argmax(-1).tolist() == chunk.proposal
        assert drawn[chunk.sequence].sum(-1).eq(1).all()
