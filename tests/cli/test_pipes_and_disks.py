"""Inputs that come once or never, and outputs that cannot be written: told in one sentence, before work is lost."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.compress.conftest import tiny, tokenizer
from tightfit.bounded_files import read_text
from tightfit.errors import UserError

__all__ = ["tiny", "tokenizer"]


def test_prompts_may_come_through_a_pipe(tiny: Path, tightfit: Any, tmp_path: Path) -> None:
    """They were read twice, the second time in vain."""
    reader, writer = os.pipe()
    os.write(writer, b'{"prompt": "the"}\n{"prompt": "quick"}\n')
    os.close(writer)
    made = tightfit("generate", tiny, "--in", f"/dev/fd/{reader}", "--out", tmp_path / "out.jsonl", "-n", 2)
    os.close(reader)
    assert (made.code, "2 prompts answered" in made.out) == (0, True), made.err


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "RUN", "--in", "PROMPTS", "--out", "FILE/below"],
        ["export", "RUN", "FILE/below"],
        ["export", "RUN", "FILE/below.gguf", "--dtype", "q4_0"],
        ["compress", "RUN", "--method", "rtn", "--out", "FILE/below/it"],
        ["evaluate", "RUN", "--data", "FILE", "--against", "RUN", "--picture", "FILE/below.png"],
    ],
    ids=lambda words: " ".join(words[:1] + words[-2:]),
)
def test_an_output_that_cannot_be_written_is_told_before_a_model_is_loaded(
    words: list[str], tiny: Path, tightfit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loads(*arguments: object, **more: object) -> None:
        raise AssertionError("a model was loaded")

    for module in ("serve.start", "models.saving", "compress.gguf.gguf_export", "compress.comparison"):
        monkeypatch.setattr(f"tightfit.{module}.load_model", loads)
    monkeypatch.setattr("tightfit.compress.compression.ModelParts", loads)
    (tmp_path / "file.txt").write_text("some text")
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}')
    places = {"RUN": tiny, "PROMPTS": tmp_path / "in.jsonl", "FILE": tmp_path / "file.txt"}
    for name, place in places.items():
        words = [word.replace(name, str(place)) for word in words]
    made = tightfit(*words)
    assert made.code == 2
    assert "file.txt is not a directory; choose a writable directory" in made.err


def test_settings_that_cannot_be_are_told_before_a_model_is_loaded(
    tiny: Path, tightfit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tightfit.serve.start.load_model", lambda *given, **more: pytest.fail("loaded"))
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}')
    made = tightfit("generate", tiny, "--in", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", "-n", 0)
    assert made.code == 2
    assert made.err == "tightfit: max_tokens is 0; it must be at least 1\n"


def test_tokens_of_a_beam_search_are_not_called_those_of_answers(tiny: Path, tightfit: Any, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}')
    words = ("--in", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", "-n", 3, "--beams", 2)
    assert "1 prompt answered, 5 tokens of all beams, in " in tightfit("generate", tiny, *words).out


def test_what_was_measured_is_told_though_it_cannot_be_drawn(
    tiny: Path, tightfit: Any, tmp_path: Path, token_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise UserError("cannot write picture: No space left on device")

    monkeypatch.setattr("tightfit.report.compression_report.draw_sizes", full)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 20)
    data = ("--data", tmp_path / "text.txt", "--seq", 32, "--cache", token_cache)
    made = tightfit("evaluate", tiny, *data, "--against", tiny, "--picture", tmp_path / "a.png", "--json")
    assert (made.code, "perplexity" in made.out) == (2, True)


@pytest.mark.parametrize("umask", [0o022, 0o077], ids=oct)
def test_weights_are_as_readable_as_what_lies_beside_them(
    umask: int, tiny: Path, tightfit: Any, tmp_path: Path
) -> None:
    """safetensors 0.8 makes files that only their owner can read, whatever the umask."""
    before = os.umask(umask)
    try:
        assert tightfit("export", tiny, tmp_path / "model").code == 0
        assert tightfit("compress", tiny, "--method", "rtn", "--group", 32, "--out", tmp_path / "small").code == 0
    finally:
        os.umask(before)
    for folder in ("model", "small"):
        modes = {path.stat().st_mode & 0o777 for path in (tmp_path / folder).iterdir()}
        assert modes == {0o666 & ~umask}


def test_output_to_a_full_disk_and_a_closed_input_are_sentences() -> None:
    """As a shell starts it: `tightfit models > full`, `tightfit sample … <&-`."""
    said = "tightfit: cannot write the output: No space left on device; make room and run the same again\n"
    for words in (["models"], ["models", "--json"]):
        with open("/dev/full", "w") as full:
            made = subprocess.run(
                [sys.executable, "-m", "tightfit", *words], stdout=full, stderr=subprocess.PIPE, text=True
            )
        assert (made.returncode, made.stderr) == (2, said)
    with pytest.raises(UserError, match="the standard input is closed; give text"):
        read_text(None)


@pytest.mark.parametrize("words", [["models"], ["models", "--json"], ["train", "--help"]], ids=" ".join)
def test_a_reader_that_has_gone_ends_a_command_as_a_shell_expects(words: list[str]) -> None:
    """`tightfit models | head -1`: 141, as of SIGPIPE, and not a word."""
    reader, writer = os.pipe()
    os.close(reader)
    made = subprocess.run([sys.executable, "-m", "tightfit", *words], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (made.returncode, made.stderr) == (141, "")


def test_a_model_that_only_somebody_else_may_read_is_a_sentence(
    tiny: Path, tightfit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests that run as root may read everything, so opening its weights is made to fail."""

    def closed(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("tightfit.models.files.checksums.digest", closed)
    listed = tiny / "checksums.json"
    size = (tiny / "model.safetensors").stat().st_size
    listed.write_text(json.dumps({"files": {"model.safetensors": {"bytes": size, "digest": ""}}}))
    try:
        made = tightfit("sample", tiny, "-p", "a")
    finally:
        listed.unlink()
    said = f"tightfit: {tiny}/model.safetensors: Permission denied; see who may read and write it, or name another\n"
    assert (made.code, made.err) == (2, said)

    def not_found(*arguments: object, **more: object) -> None:  # as safetensors says it
        raise FileNotFoundError("No such file or directory")

    monkeypatch.setattr("tightfit.models.huggingface.weights.safe_open", not_found)
    made = tightfit("sample", tiny, "-p", "a")
    assert (made.code, "model.safetensors may not be read by this user" in made.err) == (2, True)
