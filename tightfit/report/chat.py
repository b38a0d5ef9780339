"""A conversation at the terminal: answers are streamed, or the whole conversation is printed as JSON."""

import sys
from collections.abc import Iterable, Sequence

from tightfit.printable import printable
from tightfit.report.tables import print_json
from tightfit.serve.chat import Chat, converse


def print_chat(chat: Chat, questions: Sequence[str], *, asks: bool, as_json: bool) -> None:
    """Ask `questions` one after another, then, with `asks`, questions typed at the terminal."""
    if as_json:
        for question in questions:
            "".join(chat.ask(question))
        answers = [message["content"] for message in chat.messages if message["role"] == "assistant"]
        return print_json({"prompt": questions[0], "continuations": answers[:1], "messages": chat.messages})
    for question in questions:
        if len(questions) > 1:
            print(f"> {printable(question)}")
        _show(chat.ask(question))
    if asks:
        print("An empty line asks nothing; Ctrl-D ends the chat.", file=sys.stderr)
        converse(chat, lambda: input("> "), _show)


def _show(pieces: Iterable[str]) -> None:
    for piece in pieces:
        print(printable(piece), end="", flush=True)
    print()
