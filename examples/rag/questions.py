"""Questions on the documentation: which topics answer them, and a word that a right answer has."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """A question with its truth."""

    text: str
    topics: frozenset[str]
    word: str


def _question(text: str, topics: str, word: str) -> Question:
    return Question(text, frozenset(topics.split()), word)


QUESTIONS = [
    _question("Which statement is a null operation, so that nothing happens when it is executed?", "pass", "pass"),
    _question(
        "Which exception does an assert statement raise when its expression is false?", "assert", "AssertionError"
    ),
    _question(
        "Which statement makes names refer to variables of the nearest enclosing function?", "nonlocal", "nonlocal"
    ),
    _question("What does the del statement do with a name?", "del", "binding"),
    _question("Which clause of a try statement is executed in any case, on the way out?", "try", "finally"),
    _question(
        "Which method of a context manager is called at the end of a with statement?",
        "with context-managers",
        "__exit__",
    ),
    _question("Which statement ends the nearest enclosing loop?", "break", "break"),
    _question("Which keyword makes small anonymous functions?", "lambda", "lambda"),
    _question("Which string method returns a copy with all characters in lowercase?", "string-methods", "lower"),
    _question("Which operator binds more tightly than unary operators on its left?", "power", "**"),
    _question("Which statement is for names that are interpreted as globals?", "global", "global"),
    _question("Which method does the += operator call on an object?", "numeric-types", "__iadd__"),
]
