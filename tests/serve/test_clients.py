"""Other people's clients against the server: litellm, and llm and curl as programs."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.running import Running, running
from tightfit.models.loading import LoadedModel
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine

CONFIG = EngineConfig(max_sequences=4, step_tokens=64, block_size=4, cache_bytes=2**20)
HELLO: Any = [{"role": "user", "content": "the quick brown fox"}]


@pytest.fixture(scope="module")
def server(loaded: LoadedModel) -> Iterator[Running]:
    with running(loaded, Engine(loaded.model, loaded.tokenizer, CONFIG)) as made:
        yield made
        made.wait_until_idle()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_litellm(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for prices
    import litellm

    settings: dict[str, Any] = {
        "model": "openai/tiny",
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "messages": HELLO,
        "max_tokens": 8,
        "temperature": 0,
    }
    whole = litellm.completion(**settings)
    assert whole.usage.completion_tokens <= 8
    pieces = [piece.choices[0].delta.content or "" for piece in litellm.completion(stream=True, **settings)]
    assert "".join(pieces) == whole.choices[0].message.content
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**settings | {"temperature": 1000})


def test_llm(server: Running, tmp_path: Path) -> None:
    import llm

    assert llm.__name__
    models = f"- model_id: ours\n  model_name: tiny\n  api_base: {server.url}/v1\n"
    (tmp_path / "extra-openai-models.yaml").write_text(models)
    environment = os.environ | {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none", "LLM_LOAD_PLUGINS": ""}
    command = [sys.executable, "-m", "llm", "prompt", "the quick", "-m", "ours", "-o", "temperature", "0"]
    result = subprocess.run(
        [*command, "-o", "max_tokens", "8"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    body = {"model": "tiny", "messages": [{"role": "user", "content": "the quick"}], "temperature": 0, "max_tokens": 8}
    import urllib.request

    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        wanted = json.loads(response.read())["choices"][0]["message"]["content"]
    assert result.stdout.strip() == wanted.strip()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(server: Running) -> None:
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 8, "temperature": 0}
    whole = json.loads(_curl(server, asked))["choices"][0]["message"]["content"]
    lines = _curl(server, asked | {"stream": True}).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    pieces = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines[:-2]]
    assert "".join(piece.get("content") or "" for piece in pieces) == whole
    refused = json.loads(_curl(server, asked | {"temperature": 1000}, fails=True))
    assert "temperature" in refused["error"]["message"]


def _curl(server: Running, asked: dict[str, Any], *, fails: bool = False) -> str:
    """What curl prints; it exits with 22 where the status is 400 or more."""
    command = ["curl", "--silent", "--no-buffer", "--fail-with-body", "--max-time", "60", "-d", json.dumps(asked)]
    url = f"{server.url}/v1/chat/completions"
    made = subprocess.run([*command, "-H", "Content-Type: application/json", url], capture_output=True, text=True)
    assert made.returncode == (22 if fails else 0)
    return made.stdout
