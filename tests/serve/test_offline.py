"""Files of prompts: answered once each, gone on with after a kill, refused with the line that is wrong."""

import json
from pathlib import Path

import pytest

from tightfit.errors import UserError
from tightfit.models.decoder import Decoder
from tightfit.models.loading import LoadedModel
from tightfit.models.tokenizer import Tokenizer
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.offline import answer_file, finished_ids, read_prompts
from tightfit.serve.sampling import Sampling

CONFIG = EngineConfig(max_sequences=2, step_tokens=64, block_size=4, cache_bytes=2**20)
SAMPLING = Sampling(max_tokens=6, temperature=0.9, seed=3)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_every_prompt_is_answered_once_and_a_killed_run_goes_on(loaded: LoadedModel, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked = [
        {"prompt": "the quick"},
        {"id": "chat", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3},
        {"id": "ids", "tokens": [5, 6, 7], "n": 2, "temperature": 0},
        *({"id": i, "prompt": f"number {i}"} for i in range(10, 16)),
    ]
    source.write_text("\n".join(map(json.dumps, asked)) + "\n\n")
    seen: list[tuple[int, int]] = []
    engine = Engine(loaded.model, loaded.tokenizer, CONFIG)
    assert answer_file(engine, source, target, SAMPLING, lambda done, total: seen.append((done, total))) == 9
    whole = {line["id"]: line for line in lines(target)}
    assert set(whole) == {"1", "chat", "ids", *map(str, range(10, 16))}
    assert whole["chat"]["usage"]["completion_tokens"] <= 3
    assert len(whole["ids"]["text"]) == 2
    assert seen[0] == (0, 9)
    assert seen[-1] == (9, 9)
    kept = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(b"".join(kept[:4]) + kept[4][:11])  # as a kill in the middle of a line leaves it
    assert answer_file(Engine(loaded.model, loaded.tokenizer, CONFIG), source, target, SAMPLING) == 5
    assert {line["id"]: line for line in lines(target)} == whole
    assert answer_file(engine, source, target, SAMPLING) == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "has no prompts"),
        ("{", "line 1 is not JSON"),
        ('{"id": 1}', "line 1 needs one of prompt, tokens and messages"),
        ('{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}', "the id '1' in lines 1 and 2"),
        ('{"prompt": 5}', "line 1: prompt is not a text"),
        ('{"prompt": "a", "top_p": 9}', "line 1: top_p is 9"),
        ('{"prompt": "a", "top_p": "x"}', "line 1: "),
        ('{"tokens": [9999]}', "token 9999"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(
    model: Decoder, tokenizer: Tokenizer, tmp_path: Path, text: str, expected: str
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(text)
    with pytest.raises(UserError, match=expected):
        answer_file(Engine(model, tokenizer, CONFIG), source, target, SAMPLING)
    assert not target.exists()


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text('{"something": "else"}\n')
    with pytest.raises(UserError, match="no output of ours"):
        finished_ids(target)
    with pytest.raises(UserError, match="cannot read"):
        read_prompts(tmp_path / "missing")
