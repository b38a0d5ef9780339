"""Ask Python's documentation: embed, store, retrieve, answer with citations, and see what retrieval is worth.

    python -m examples.rag                        # starts a server of SmolLM2, asks twelve questions, prints a table
    python -m examples.rag --ask "What does pass do?"
    python -m examples.rag --url http://127.0.0.1:8000      # a server that runs already

Needs `pip install sqlite-vec apsw`, and `pip install wordllama` for the better vectors.
"""

import argparse
import contextlib
import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from examples.rag.embedding import Embed, post, served, wordllama
from examples.rag.passages import Passage, passages
from examples.rag.questions import QUESTIONS, Question

INSTALL = "pip install sqlite-vec apsw"
COUNT = 3
SHOWN_CHARACTERS = 600
CITED = r"[^\[\]\n]{10,160}\[[1-3]\]"
"""The form of an answer: a sentence or two and the number of a passage, which a small model would forget."""


@dataclass(frozen=True)
class Cited:
    """An answer, and the passage it names."""

    text: str
    source: Passage | None


class Library:
    """Passages that can be asked."""

    def __init__(self, url: str, embed: Embed, found: list[Passage], path: str = ":memory:") -> None:
        self.url, self.embed = url, embed
        from examples.rag.index import Index

        vectors = embed([passage.text for passage in found])
        self.index = Index(path, len(vectors[0]))
        self.index.add(found, vectors)

    def retrieve(self, question: str) -> list[Passage]:
        """The passages that may answer it."""
        return self.index.nearest(self.embed([question])[0], COUNT)

    def answer(self, question: str) -> Cited:
        """From the passages, naming one of them."""
        found = self.retrieve(question)
        listed = "\n\n".join(f"[{n}] {each.text[:SHOWN_CHARACTERS]}" for n, each in enumerate(found, 1))
        told = f"Passages of Python's documentation:\n\n{listed}"
        asked = f"{told}\n\nFrom these, answer with the passage's number: {question}"
        text = said(self.url, asked, guided_regex=CITED)
        number = re.search(r"\[([1-3])\]", text)
        return Cited(text, found[int(number[1]) - 1] if number and int(number[1]) <= len(found) else None)


def said(url: str, question: str, **more: object) -> str:
    """What the model answers."""
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 80, **more}
    return str(post(f"{url}/v1/chat/completions", body)["choices"][0]["message"]["content"])


def evaluate(library: Library, questions: list[Question]) -> dict[str, float]:
    """Shares of questions: retrieved, cited and right with retrieval, right without."""
    hits = cited = right = alone = 0
    for question in questions:
        hits += any(passage.topic in question.topics for passage in library.retrieve(question.text))
        made = library.answer(question.text)
        cited += made.source is not None and made.source.topic in question.topics
        right += question.word.lower() in made.text.lower()
        without = said(library.url, f"On Python: {question.text}")
        alone += question.word.lower() in without.lower()
        print(f"{question.text}\n  with: {made.text}\n  without: {without[:160]!r}", flush=True)
    total = len(questions)
    return {
        "questions": total,
        f"hit_rate_at_{COUNT}": hits / total,
        "right_source_cited": cited / total,
        "right_with_retrieval": right / total,
        "right_without": alone / total,
    }


def check(index: str) -> None:
    """Say what is missing before a model is loaded."""
    try:
        import examples.rag.index  # noqa: F401
    except ModuleNotFoundError as error:
        raise SystemExit(f"this example needs {error.name}, which is not installed: {INSTALL}") from None
    if index != ":memory:" and Path(index).exists():
        raise SystemExit(f"--index is {index}, which exists already; name a new file, or remove it")


@contextlib.contextmanager
def server(model: str) -> Iterator[str]:
    """The address of a server that runs until the block is left."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = int(found.getsockname()[1])
    process = subprocess.Popen([sys.executable, "-m", "tightfit", "serve", model, "--port", str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                break
            time.sleep(0.2)
        else:
            raise SystemExit(f"the server of {model} did not start; above it says why")
        yield url
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    """Build the index, then ask or evaluate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--ask", help="one question instead of the evaluation")
    parser.add_argument("--vectors", choices=("auto", "wordllama", "server"), default="auto")
    parser.add_argument("--index", default=":memory:", help="a new SQLite file for passages and vectors")
    parser.add_argument("--few", action="store_true", help="only the topics that the questions are about")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS))
    arguments = parser.parse_args()
    check(arguments.index)
    with contextlib.nullcontext(arguments.url) if arguments.url else server(arguments.model) as url:
        own = None if arguments.vectors == "server" else wordllama()
        if own is None and arguments.vectors == "wordllama":
            raise SystemExit("wordllama is not installed: pip install wordllama")
        print(f"vectors by {'WordLlama' if own else 'the served model'}", flush=True)
        names = sorted({topic for question in QUESTIONS for topic in question.topics}) if arguments.few else None
        library = Library(url, own or served(url), passages(names), arguments.index)
        if arguments.ask:
            made = library.answer(arguments.ask)
            print(f"{made.text}\n  from {made.source.topic if made.source else 'nowhere'}")
            return
        print(json.dumps(evaluate(library, QUESTIONS[: arguments.questions])))


if __name__ == "__main__":
    main()
