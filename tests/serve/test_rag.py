"""The retrieval example, small: like finds like, answers name a passage, and the numbers of its evaluation add up."""

import hashlib
import json
import re
import sys
import urllib.request
from pathlib import Path
from types import ModuleType

import pytest

from tests.serve.running import running
from tightfit.models.loading import LoadedModel
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine

CONFIG = EngineConfig(max_sequences=4, step_tokens=256, cache_bytes=2**20)
TOPICS = ["pass", "assert", "del", "lambda", "global"]


def bag_of_words(texts: list[str]) -> list[list[float]]:
    """Vectors whose likeness is the words that texts share."""
    made = []
    for text in texts:
        row = [1e-3] * 256
        for word in set(re.findall(r"[a-z]{4,}", text.lower())):
            row[hashlib.blake2b(word.encode(), digest_size=1).digest()[0]] += 1.0
        made.append(row)
    return made


def test_passages_are_found_by_their_words() -> None:
    from examples.rag.index import Index
    from examples.rag.passages import passages

    found = passages(TOPICS)
    assert {passage.topic for passage in found} == set(TOPICS)
    index = Index(":memory:", 256)
    index.add(found, bag_of_words([passage.text for passage in found]))
    for passage in found:
        assert index.nearest(bag_of_words([passage.text])[0], 1) == [passage]
    assert len(index.nearest(bag_of_words(["null operation"])[0], 3)) == 3


def test_questions_name_topics_that_exist() -> None:
    from pydoc_data.topics import topics

    from examples.rag.questions import QUESTIONS

    for question in QUESTIONS:
        assert question.topics <= topics.keys()
        assert any(question.word.lower() in topics[topic].lower() for topic in question.topics)


def test_answers_are_evaluated(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a model that says nothing sensible; the form of its answers is ours."""
    from examples.rag import __main__ as rag
    from examples.rag.embedding import served
    from examples.rag.passages import Passage
    from examples.rag.questions import QUESTIONS

    monkeypatch.setattr(rag, "SHOWN_CHARACTERS", 20)
    with running(loaded, Engine(loaded.model, loaded.tokenizer, CONFIG)) as server:
        few = [Passage(topic, f"about {topic}") for topic in TOPICS]
        library = rag.Library(server.url, bag_of_words, few)
        made = library.answer("What is the pass statement?")
        assert re.fullmatch(r"[^\[\]\n]+(\[[1-3]\])?", made.text)  # the number is last, where there was room for it
        if made.text.endswith("]"):
            assert made.source == library.retrieve("What is the pass statement?")[int(made.text[-2]) - 1]
        found = rag.evaluate(library, QUESTIONS[:2])
        assert found["questions"] == 2
        assert all(0 <= share <= 1 for name, share in found.items() if name != "questions")
        vectors = served(server.url)(["a", "b"])
        assert len(vectors) == 2
        assert len(vectors[0]) == loaded.model.spec.hidden_size
        server.wait_until_idle()


def test_one_command_starts_a_server_builds_an_index_and_evaluates(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As the README has it, with a tiny model, few passages and one question; the server is a process, and ends."""
    from examples.rag import __main__ as rag
    from examples.rag.passages import Passage

    monkeypatch.setattr(rag, "SHOWN_CHARACTERS", 20)
    monkeypatch.setattr(rag, "passages", lambda names: [Passage(topic, f"about {topic}") for topic in TOPICS])
    index = tmp_path / "index.sqlite"
    options = ["--model", str(directory), "--vectors", "server", "--questions", "1", "--index", str(index)]
    monkeypatch.setattr("sys.argv", ["rag", *options])
    rag.main()
    told = capfd.readouterr().out.splitlines()
    assert "vectors by the served model" in told
    found = json.loads(told[-1])
    assert found["questions"] == 1
    assert 0 <= found["hit_rate_at_3"] <= 1
    assert index.stat().st_size > 0
    url = next(word for line in told for word in line.split() if word.startswith("http://127.0.0.1:"))
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{url}/health", timeout=5)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--index", "there.sqlite"], r"--index is there.sqlite, which exists already; name a new file"),
        (["--url", "http://127.0.0.1:9"], r"no model server answers at http://127.0.0.1:9/.*tightfit serve"),
    ],
)
def test_mistakes_are_one_sentence(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples.rag import __main__ as rag

    unused = ModuleType("examples.rag.index")
    unused.Index = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, unused.__name__, unused)  # which needs packages
    monkeypatch.chdir(tmp_path)
    Path("there.sqlite").touch()
    monkeypatch.setattr("sys.argv", ["rag", "--few", "--vectors", "server", *words])
    with pytest.raises(SystemExit, match=sentence):
        rag.main()


def test_a_package_that_is_missing_is_named_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from examples.rag import __main__ as rag

    monkeypatch.delitem(sys.modules, "examples.rag.index", raising=False)
    monkeypatch.setitem(sys.modules, "apsw", None)
    monkeypatch.setattr("sys.argv", ["rag"])
    with pytest.raises(SystemExit, match="needs apsw, which is not installed: pip install sqlite-vec apsw"):
        rag.main()
