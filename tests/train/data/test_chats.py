"""Conversations: every published shape becomes the same messages, and rows that teach nothing are refused."""

import importlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tightfit.errors import UserError
from tightfit.train.data.chats import read_chats
from tightfit.train.data.sources import find_sources

HELLO = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
SHAPES: list[dict[str, Any]] = [
    {"messages": HELLO},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    {"conversations": [{"from": "user", "value": "Hi"}, {"from": "assistant", "value": "Hello"}]},
    {"instruction": "Hi", "output": "Hello"},
    {"instruction": "Hi", "input": "", "output": "Hello"},
    {"prompt": "Hi", "completion": "Hello"},
    {"prompt": "Hi", "response": "Hello"},
    {"question": "Hi", "answer": "Hello"},
    {"messages": None, "question": "Hi", "answer": "Hello", "id": 7},
]


def chats_of(path: Path, *rows: dict[str, Any]) -> list[list[dict[str, str]]]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [chat.messages for chat in read_chats(find_sources([str(path)], rows_only=True))]


def test_every_shape_becomes_the_same_messages(tmp_path: Path) -> None:
    assert chats_of(tmp_path / "a.jsonl", *SHAPES) == [HELLO] * len(SHAPES)


def test_system_messages_inputs_and_further_turns_are_kept(tmp_path: Path) -> None:
    shared = [("system", "Be brief"), ("human", "Hi"), ("gpt", "Hello"), ("human", "Bye"), ("gpt", "")]
    first, second = chats_of(
        tmp_path / "a.jsonl",
        {"conversations": [{"from": role, "value": text} for role, text in shared]},
        {"instruction": "Add", "input": "1 2", "output": "3"},
    )
    assert [message["role"] for message in first] == ["system", "user", "assistant", "user", "assistant"]
    assert second[0]["content"] == "Add\n\n1 2"


def test_parquet_rows_are_recognised_one_by_one(tmp_path: Path) -> None:
    table = {"messages": [HELLO, None], "prompt": [None, "Hi"], "completion": [None, "Hello"], "extra": [1, 2]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    chats = list(read_chats(find_sources([str(tmp_path)], rows_only=True)))
    assert [chat.messages for chat in chats] == [HELLO, HELLO]
    assert chats[1].where == f"{tmp_path / 'a.parquet'} row 2"


def test_saved_datasets_hold_chats_too(tmp_path: Path) -> None:
    datasets = importlib.import_module("datasets")  # seconds, of the worker that runs this alone
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"messages": [HELLO], "id": [1]}).save_to_disk(tmp_path / "saved")
    assert [chat.messages for chat in read_chats(find_sources([str(tmp_path / "saved")], rows_only=True))] == [HELLO]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [HELLO[0]]}, "line 2 has no answer of the assistant to learn from; add one or remove the row"),
        ({"messages": []}, "line 2 has no answer"),
        ({"question": "Hi", "answer": "  "}, "line 2 has no answer"),
        ({"text": "Hi"}, r"line 2 has none of the fields 'messages', .*'prompt \+ completion'.* \(it has 'text'\)"),
        ({"prompt": "Hi"}, r"line 2 has none of the fields .* \(it has 'prompt'\)"),
        ({"messages": "Hi"}, "line 2 has str in field 'messages'; it must be a list of messages"),
        ({"messages": ["Hi"]}, "message 1 of .* line 2 is not an object with 'role' and 'content'"),
        ({"messages": [{"role": "user"}]}, "message 1 of .* line 2 is not an object with 'role' and 'content'"),
        (
            {"messages": [*HELLO, {"role": "bot", "content": ""}]},
            "message 3 of .* has the role 'bot'; known are system",
        ),
        ({"messages": [{"role": ["user"], "content": ""}]}, r"message 1 of .* has the role \['user'\]"),
        ({"messages": [{"role": "user", "content": None}]}, "message 1 of .* line 2 has null in field 'content'"),
        ({"conversations": [{"from": "bing", "value": ""}]}, "message 1 of .* has the from 'bing'; known are .*human"),
        ({"prompt": 3, "completion": "x"}, "line 2 has int in field 'prompt'; it must be a string"),
        ({"instruction": "a", "output": "b", "input": 3}, "line 2 has int in field 'input'; it must be a string"),
    ],
)
def test_rows_that_teach_nothing_are_refused(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        chats_of(tmp_path / "a.jsonl", SHAPES[0], row)
