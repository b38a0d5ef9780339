"""What is searched: Python's own documentation as `pydoc` has it, cut into passages of a few paragraphs."""

from dataclasses import dataclass
from pydoc_data.topics import topics

PASSAGE_CHARACTERS = 700


@dataclass(frozen=True)
class Passage:
    """A piece of one topic of the documentation."""

    topic: str
    text: str


def passages(names: list[str] | None = None) -> list[Passage]:
    """The passages of these topics, of all where none are named."""
    return [
        Passage(topic, text)
        for topic in sorted(topics)
        if names is None or topic in names
        for text in _pieces(topics[topic])
    ]


def _pieces(text: str) -> list[str]:
    """Whole paragraphs together while they fit."""
    made: list[str] = []
    for paragraph in (each.strip() for each in text.split("\n\n")):
        if made and len(made[-1]) + len(paragraph) < PASSAGE_CHARACTERS:
            made[-1] += "\n" + paragraph
        elif paragraph:
            made.append(paragraph[: 2 * PASSAGE_CHARACTERS])
    return made
