"""The base install has no torch: inspecting works there, and training says what to install."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.covering import sampled

BLOCKED = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "numpy", "transformers", "safetensors", "tokenizers", "matplotlib"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
sys.argv[0] = "tightfit"
from tightfit.cli.main import main
main()
"""


def base_install(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BLOCKED, *arguments], capture_output=True, text=True)


@sampled(2)
@pytest.mark.parametrize(
    "arguments", [["--help"], ["models"], ["models", "llama-3.1-8b", "--json"], ["train", "--fields"]]
)
def test_inspecting_needs_no_torch(arguments: list[str]) -> None:
    made = base_install(*arguments)
    assert made.returncode == 0, made.stderr
    assert made.stdout


@pytest.mark.parametrize("verb", ["train", "measure", "check"])
def test_a_mistake_in_a_job_is_told_before_torch_is_imported(verb: str, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("model: tiny-llama\ndata: notes.txt\noutput: out\nsteps: 1\nlayout: {data: 2}\n")
    made = base_install(verb, str(job), "-o", "global_batch=7")
    assert made.returncode == 2
    assert "global_batch 7 is not a multiple of" in made.stderr


@sampled(3)
@pytest.mark.parametrize("arguments", [["train"], ["sample", "somewhere", "-p", "x"], ["export", "a", "b"]])
def test_what_needs_torch_says_how_to_get_it(arguments: list[str]) -> None:
    made = base_install(*arguments)
    assert made.returncode == 2
    assert made.stderr.startswith("tightfit: this needs ")
    assert "pip install 'tightfit[train]'" in made.stderr
    assert "Traceback" not in made.stderr
