"""`tightfit serve` and its mistakes: each is one sentence, before a model is loaded."""

import errno
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tightfit.errors import UserError
from tightfit.serve import start
from tightfit.serve.config import EngineConfig
from tightfit.serve.http.address import check_address

pytest.importorskip("uvicorn", reason="pip install 'tightfit[serve]'")
MISTAKES = {
    "a cache of nothing": (["--cache-gib", "-1"], "--cache-gib is -1; give a number above 0"),
    "a cache without end": (["--cache-gib", "inf"], "--cache-gib is inf; give"),
    "a host cache without end": (["--host-cache-gib", "inf"], "--host-cache-gib is inf; give"),
    "no time": (["--max-seconds", "0"], "--max-seconds is 0; give"),
    "no body": (["--max-body-mib", "nan"], "--max-body-mib is nan; give"),
    "more than the positions": (["--max-length", "2048"], "--max-length is 2048, but tiny-llama has 256 positions"),
    "nobody's name": (["--host", "nonsense..name"], "--host is 'nonsense..name', which has no address; give 127.0.0.1"),
    "the same answers by guesses": (
        ["--batch-invariant", "--lookup"],
        "--batch-invariant does not go with --lookup; leave one of them out",
    ),
    "the same answers on two cards": (
        ["--batch-invariant", "--tensor", "2"],
        "--batch-invariant does not go with --ten",
    ),
    "copies of what several ranks keep": (
        ["--tensor", "2", "--host-cache-gib", "1"],
        "--host-cache-gib is for a model on one rank; leave out --tensor and --pipeline, or do without it",
    ),
    "layers skipped by several ranks": (
        ["--pipeline", "2", "--skip", "1"],
        "--skip is for a model on one rank; leave out --tensor and --pipeline, or use --lookup",
    ),
    "a cache of ours in vLLM": (
        ["--export", "vllm", "--cache-gib", "4"],
        "--cache-gib is 4.0, which is about our own server; leave it or --export out",
    ),
    "guesses of nobody": (
        ["--guesses", "2"],
        "--guesses is 2, but speculation is off; add --draft, --lookup or --skip",
    ),
    "no key": (["--api-key", ""], "--api-key is empty, or has spaces around it"),
    "a key that no client can send": (["--api-key", "secret "], "--api-key is empty, or has spaces around it"),
    "a key in a file": (["--export", "vllm", "--api-key", "secret"], "--api-key is given, but no key is written to"),
    "a file of no export": (["--out", "x.sh"], "--out is x.sh, which is about --export; add that or leave it out"),
    "somebody else's address": (["--host", "192.0.2.1"], "--host is '192.0.2.1', which is no address of this machine"),
}


@pytest.fixture
def serve(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    def no_model(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(start, "start_engine", no_model)
    return lambda *words: Run(capfd, monkeypatch, "serve", "tiny-llama", *map(str, words))


@pytest.mark.parametrize(("words", "sentence"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_one_sentence_and_exit_code_2(serve: Any, words: list[str], sentence: str) -> None:
    made = serve(*words)
    assert (made.code, made.out) == (2, "")
    assert made.err.startswith(f"tightfit: {sentence}")
    assert made.err.count("\n") == 1


def test_a_mistake_in_a_line_of_prompts_is_told_before_a_model_is_loaded(
    serve: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a", "top_p": 9}')
    made = Run(capfd, monkeypatch, "generate", "tiny-llama", "--in", str(prompts), "--out", str(tmp_path / "out"))
    assert made.err.startswith(f"tightfit: {prompts}, line 1: top_p is 9;")


def test_what_is_not_there_is_no_shape_either(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could be served is told, and not the shapes that have no weights."""
    made = Run(capfd, monkeypatch, "serve", "absent/model")
    assert made.code == 2
    assert made.err.startswith("tightfit: there is no model at 'absent/model'; to download it")


def test_a_port_that_is_taken_is_told_before_a_model_is_loaded(serve: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        made = serve("--port", port)
    assert made.code == 2
    assert made.err == (
        f"tightfit: port {port} on 127.0.0.1 is taken by another program; give another with --port, or end that one\n"
    )
    check_address("127.0.0.1", port)


def test_ports_of_the_system_need_rights(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refused)
    assert "port 80 on 127.0.0.1 needs more rights than this user has; give one above 1023" in serve("--port", 80).err


@pytest.mark.parametrize("verb", ["serve", "generate"])
def test_batch_invariance_is_asked_for(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: str
) -> None:
    """What the engine is then started with; a draft model beside it is refused before one is loaded."""
    found = []

    def started(_: str, config: EngineConfig, **__: object) -> None:
        found.append(config)
        raise UserError("far enough")

    monkeypatch.setattr(start, "start_engine", started)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hello"}\n')
    words = {"serve": [], "generate": ["--in", str(prompts), "--out", str(tmp_path / "answers.jsonl")]}[verb]
    for more in ([], ["--batch-invariant"]):
        assert "far enough" in Run(capfd, monkeypatch, verb, "tiny-llama", *words, *more).err
    assert [config.batch_invariant for config in found] == [False, True]
    made = Run(capfd, monkeypatch, verb, "tiny-llama", *words, "--batch-invariant", "--draft", "tiny-llama")
    assert made.err == "tightfit: --batch-invariant does not go with --draft; leave one of them out\n"
    assert len(found) == 2
