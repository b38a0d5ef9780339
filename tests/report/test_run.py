"""What a finished run prints of its speed."""

from pathlib import Path

import pytest

from tightfit.jobs.load import parse_job
from tightfit.report.run import print_result
from tightfit.train.loop import RunResult

JOB = parse_job("{model: tiny-llama, data: notes.txt, output: runs/x, steps: 10}", "job.yaml")


@pytest.mark.parametrize(
    ("mfu", "words"),
    [(0.43, "1,000 tokens/s over 9 s of training; 43% of the card's FLOP/s (MFU)"), (None, "training")],
)
def test_mfu_is_told_where_the_card_is_known(
    mfu: float | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = RunResult(
        run=tmp_path,
        checkpoint=tmp_path / "checkpoints" / "step-00000010",
        step=10,
        steps=10,
        params=1000,
        device="NVIDIA H200",
        precision="bf16",
        start=None,
        end=None,
        tokens_per_second=1000.0,
        train_seconds=9.0,
        peak_bytes=2**30,
        mfu=mfu,
    )
    print_result(result, JOB, as_json=False)
    (speed,) = (line for line in capsys.readouterr().out.splitlines() if "tokens/s" in line)
    assert speed.endswith(words)
