"""What a finished run prints of its speed."""

from pathlib import Path

import pytest

from tightfit.jobs.load import parse_job
from tightfit.report.run import print_result
from tightfit.train.loop import RunResult

JOB = parse_job("{model: tiny-llama, data: notes.txt, output: runs/x, steps: 10}", "job.yaml")


@pytest.mark.parametrize(
    ("mfu", "warmup", "words"),
    [
        (0.43, 0, "1,000 tokens/s over 9 s of training; 43% of the card's FLOP/s (MFU)"),
        (None, 0, "training"),
        (None, 1, "training, of which the first step took 2.0 s to warm up"),
        (None, 3, "training, of which the first 3 steps took 2.0 s to warm up"),
    ],
)
def test_speed_is_told_with_what_is_known_of_it(
    mfu: float | None, warmup: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
        warmup_steps=warmup,
        warmup_seconds=2.0,
    )
    print_result(result, JOB, as_json=False)
    (speed,) = (line for line in capsys.readouterr().out.splitlines() if "tokens/s" in line)
    assert speed.endswith(words)
