"""Models named `hf:org/name`, from an endpoint of the hub's protocol that runs here."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.models import TINY, tiny_model
from tightfit.errors import UserError
from tightfit.models import hub
from tightfit.models.loading import load_model
from tightfit.models.resolve import resolve_spec
from tightfit.models.saving import write_model

COMMIT = "0" * 39 + "1"


class Endpoint(BaseHTTPRequestHandler):
    """Enough of the hub: what a repository holds, and its files; `org/gated` and others are refused as the hub does."""

    files: dict[str, bytes]
    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(path)
        if "/org/gated" in path:
            return self._answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        if path.startswith("/api/models/org/tiny/tree/"):
            sizes = {name: len(content) for name, content in self.files.items()}
            listed = [{"type": "file", "path": name, "size": size, "oid": "0"} for name, size in sizes.items()]
            return self._answer(200, json.dumps(listed).encode())
        if path.startswith("/api/models/org/tiny/"):
            names = [{"rfilename": name} for name in self.files]
            return self._answer(200, json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": names}).encode())
        name = path.rpartition("/")[2]
        if path.startswith("/org/tiny/resolve/") and name in self.files:
            content = self.files[name]
            return self._answer(200, content, {"ETag": hashlib.sha1(content).hexdigest(), "X-Repo-Commit": COMMIT})
        self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _answer(self, code: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Endpoint]]:
    """The endpoint, which huggingface_hub takes for the hub: one tiny model beside a file of code and a pickle."""
    constants = pytest.importorskip("huggingface_hub.constants")
    (made := tmp_path / "made").mkdir()
    write_model(made, tiny_model(), None)
    files = {path.name: path.read_bytes() for path in made.iterdir()}
    files |= {"modeling.py": b"1/0", "pytorch_model.bin": b"."}
    endpoint = type("OneRepository", (Endpoint,), {"files": files, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), endpoint)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    place = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", place)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", place + "/{repo_id}/resolve/{revision}/{filename}", raising=True
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield endpoint
    server.shutdown()
    server.server_close()


def files_of(endpoint: type[Endpoint]) -> set[str]:
    return {path.rpartition("/")[2] for path in endpoint.asked if "/resolve/" in path}


def test_a_model_is_downloaded_and_loaded_without_code_or_pickles(repository: type[Endpoint]) -> None:
    loaded = load_model("hf:org/tiny")
    torch.testing.assert_close(loaded.model.embed.weight, tiny_model().embed.weight)
    assert files_of(repository) == {"config.json", "model.safetensors"}


def test_a_plan_downloads_the_config_alone_and_a_second_one_nothing(
    repository: type[Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_spec("hf:org/tiny") == TINY
    assert files_of(repository) == {"config.json"}
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    before = len(repository.asked)
    assert resolve_spec("hf:org/tiny") == TINY
    assert len(repository.asked) == before


def test_what_cannot_be_had_is_one_sentence(repository: type[Endpoint], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"licence accepted.*hf auth login"):
        load_model("hf:org/gated")
    with pytest.raises(UserError, match="the hub has no org/absent"):
        load_model("hf:org/absent")
    for name in ("hf:", "hf:alone", "hf:../../etc/passwd", "hf:a/b@c d", "hf:a/b/c"):
        with pytest.raises(UserError, match="not a name on the hub"):
            load_model(name)
    del repository.files["model.safetensors"]
    with pytest.raises(UserError, match="pickled weights are not loaded"):
        load_model("hf:org/tiny")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"cannot be reached.*hf download org/other"):
        load_model("hf:org/other")


def test_a_hub_name_without_the_prefix_says_how_to_download_it() -> None:
    with pytest.raises(UserError, match=r"write hf:meta-llama/Llama-3.2-1B"):
        load_model("meta-llama/Llama-3.2-1B")
    with pytest.raises(UserError, match=r"write hf:meta-llama/Llama-3.2-1B"):
        resolve_spec("meta-llama/Llama-3.2-1B")
    assert hub.hub_hint("a/b/c") is None


def test_an_adapter_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"is an adapter .LoRA.*merge_and_unload"):
        load_model(str(tmp_path))
    with pytest.raises(UserError, match=r"is an adapter .LoRA"):
        resolve_spec(str(tmp_path))
