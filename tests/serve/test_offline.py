"""Files of prompts: answered once each, gone on with after a kill, refused with the line that is wrong."""

import json
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.serve.test_adapters import ATTENTION, merged, write_adapter
from tightfit.errors import UserError
from tightfit.models.decoder import Decoder
from tightfit.models.generate import prompt_tokens
from tightfit.models.huggingface.adapter import load_adapter
from tightfit.models.loading import LoadedModel
from tightfit.models.text.tokenizer import Tokenizer
from tightfit.serve.beam import BeamSearch
from tightfit.serve.config import EngineConfig
from tightfit.serve.engine import Engine
from tightfit.serve.offline import answer_prompts, read_finished
from tightfit.serve.prompt_lines import check_settings, read_prompts
from tightfit.serve.requests.sampling import Sampling
from tightfit.writer_lock import locked_beside

CONFIG = EngineConfig(max_sequences=2, step_tokens=64, block_size=4, cache_bytes=2**20)
SAMPLING = Sampling(max_tokens=6, temperature=0.9, seed=3)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


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
    prompts = read_prompts(source)
    assert answer_prompts(engine, prompts, target, SAMPLING, lambda done, total: seen.append((done, total))) == 9
    whole = {line["id"]: line for line in lines(target)}
    assert set(whole) == {"1", "chat", "ids", *map(str, range(10, 16))}
    assert whole["chat"]["usage"]["completion_tokens"] <= 3
    assert len(whole["ids"]["text"]) == 2
    assert seen[0] == (0, 9)
    assert seen[-1] == (9, 9)
    kept = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(b"".join(kept[:4]) + kept[4][:11])  # as a kill in the middle of a line leaves it
    assert answer_prompts(Engine(loaded.model, loaded.tokenizer, CONFIG), read_prompts(source), target, SAMPLING) == 5
    assert {line["id"]: line for line in lines(target)} == whole
    assert answer_prompts(engine, read_prompts(source), target, SAMPLING) == 0


def test_ids_are_known_again_as_they_are_written(loaded: LoadedModel, tmp_path: Path) -> None:
    """Half a surrogate pair, which no UTF-8 has."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"id": "a\\ud800", "prompt": "one"}\n')
    engine = Engine(loaded.model, loaded.tokenizer, CONFIG)
    assert [answer_prompts(engine, read_prompts(source), target, SAMPLING) for _ in range(2)] == [1, 0]
    source.write_text('{"id": "a\\ud800", "prompt": "one"}\n{"id": "a?", "prompt": "two"}\n')
    with pytest.raises(UserError, match=r"has the id 'a\?' in lines 1 and 2"):
        read_prompts(source)


def test_answers_to_what_is_no_longer_asked_are_not_taken_for_those_that_are(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    """A line put before the others gave every id another prompt; the output's older answers were kept all the same."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    engine = Engine(loaded.model, loaded.tokenizer, CONFIG)
    assert answer_prompts(engine, read_prompts(source), target, SAMPLING) == 2
    before = target.read_bytes()
    with pytest.raises(UserError, match=r"line 1: the answer to '1' in .*out.jsonl is to .* name another --out"):
        answer_prompts(engine, read_prompts(source), target, replace(SAMPLING, max_tokens=2))
    with pytest.raises(UserError, match="line 1: the answer to '1'"):
        answer_prompts(engine, read_prompts(source), target, SAMPLING, beams=2)
    source.write_text('{"prompt": "new"}\n{"prompt": "one"}\n{"prompt": "two"}\n')
    with pytest.raises(UserError, match="line 1: the answer to '1'"):
        answer_prompts(engine, read_prompts(source), target, SAMPLING)
    assert target.read_bytes() == before
    source.write_text('{"prompt": "one"}\n{"prompt": "two"}\n{"prompt": "new"}\n')
    assert answer_prompts(engine, read_prompts(source), target, SAMPLING) == 1
    rows = [{name: value for name, value in row.items() if name != "asked"} for row in lines(target)]
    target.write_text("".join(json.dumps(row) + "\n" for row in rows))  # as it was written before there were digests
    assert answer_prompts(engine, read_prompts(source), target, SAMPLING) == 0


def test_beams_end_where_they_say_stop(loaded: LoadedModel, tmp_path: Path) -> None:
    """An answer that ends is its text without the token that ends it; no seed changes any."""
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "the quick"}\n{"id": "b", "prompt": "a"}\n')
    engine = Engine(loaded.model, loaded.tokenizer, CONFIG)
    found = []
    for seed, stops in (
        (1, frozenset[int]()),
        (2, frozenset[int]()),
        (3, frozenset(range(loaded.model.spec.vocab_size))),
    ):
        target = tmp_path / f"{seed}.jsonl"
        sampling = Sampling(max_tokens=4, temperature=0.9, seed=seed, stop_ids=stops)
        assert answer_prompts(engine, read_prompts(source), target, sampling, beams=2) == 2
        found.append(lines(target))
    assert found[0] == found[1]
    assert [line["finish_reason"] for line in found[0]] == ["length"] * 2
    assert [(line["text"], line["finish_reason"]) for line in found[2]] == [("", "stop")] * 2
    assert [line["usage"]["completion_tokens"] for line in found[0] + found[2]] == [4, 4, 1, 1]


def test_beams_answer_with_the_adapter_that_is_asked_for(model: Decoder, tokenizer: Tokenizer, tmp_path: Path) -> None:
    adapters = {"one": load_adapter(write_adapter(tmp_path / "one", model, ATTENTION, seed=1), model)}
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "the quick", "id": "plain"}\n{"prompt": "the quick", "id": "x", "adapter": "one"}\n')
    answer_prompts(Engine(model, tokenizer, CONFIG, adapters=adapters), read_prompts(source), target, SAMPLING, beams=3)
    found = {line["id"]: line["text"] for line in lines(target)}
    search = BeamSearch("m", prompt_tokens(tokenizer, "the quick", chat=False), 3, SAMPLING.max_tokens)
    alone = Engine(merged(model, adapters["one"]), tokenizer, CONFIG)
    while not search.is_over:
        asked = search.requests()
        made = alone.generate(asked)
        search.take([made[each.id][0] for each in asked])
    assert found["x"] == tokenizer.decode(list(search.best[0].tokens))
    assert found["x"] != found["plain"]


@pytest.mark.parametrize(
    "more",
    ['"stop": "e"', '"n": 2', '"guided_regex": "a+"', '"presence_penalty": 1', '"logit_bias": {"5": 1}', '"seed": 5'],
)
def test_what_beams_would_pass_over_is_refused(more: str, loaded: LoadedModel, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(f'{{"prompt": "a", "id": "mine", {more}}}')
    with pytest.raises(UserError, match=r"'mine' asks for .*, which beams do not have"):
        answer_prompts(Engine(loaded.model, loaded.tokenizer, CONFIG), read_prompts(source), target, SAMPLING, beams=2)
    assert not target.exists()


def test_lines_end_at_line_feeds_only(loaded: LoadedModel, tmp_path: Path) -> None:
    """Not at what Python's texts end lines with besides, nor does a byte order mark or a carriage return matter."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"prompt": "a\u2028b\x85c\u2029d", "id": "odd"}, {"prompt": "b", "id": "plain", "stop": "e"}]
    text = "\ufeff" + "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\r\n"
    source.write_text(text, "utf-8", newline="")
    assert answer_prompts(Engine(loaded.model, loaded.tokenizer, CONFIG), read_prompts(source), target, SAMPLING) == 2
    assert {line["id"] for line in lines(target)} == {"odd", "plain"}


def test_answers_have_the_form_that_a_line_asks_for(loaded: LoadedModel, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    schema = {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes", "no"]}}}
    rows = [{"prompt": "a", "guided_regex": "[0-9]{3}"}, {"prompt": "a", "response_format": schema}]
    source.write_text("\n".join(map(json.dumps, rows)))
    answer_prompts(
        Engine(loaded.model, loaded.tokenizer, CONFIG), read_prompts(source), target, replace(SAMPLING, max_tokens=20)
    )
    found = {line["id"]: line["text"] for line in lines(target)}
    assert found["1"].isdigit()
    assert found["2"] in ('"yes"', '"no"')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "has no prompts"),
        ("{", "line 1 is not JSON"),
        ('{"id": 1}', "line 1 needs one of prompt, tokens and messages"),
        ('{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}', "the id '1' in lines 1 and 2"),
        ('{"prompt": 5}', "line 1: prompt is 5; give a text"),
        ('{"prompt": "a", "top_p": 9}', "line 1: top_p is 9"),
        ('{"prompt": "a", "top_p": "x"}', "line 1: top_p is 'x'; it must be a number"),
        ('{"prompt": "a", "max_tokens": 1e308}', "line 1: max_tokens is 1e.308; it must be a whole number"),
        ('{"prompt": "a", "stop": {"b": 1}}', "line 1: stop is {'b': 1}; it must be a list of texts"),
        ('{"prompt": "a", "stop": [1]}', "line 1: stop is"),
        ('{"prompt": "a", "logprobs": true}', "line 1: logprobs is True; it must be a whole number"),
        ('{"prompt": "a", "logprobs": 2}', "line 1: logprobs is 2, but a file of answers has none; leave it out"),
        ('{"prompt": "a", "logit_bias": [5]}', "line 1: logit_bias is .5.; it must be an object"),
        ('{"prompt": "a", "logit_bias": {"a": 1}}', "line 1: logit_bias is 'a'; give a whole number"),
        ('{"prompt": "a", "logit_bias": {"1": "b"}}', "line 1: logit_bias of 1 is 'b'; it must be a number"),
        ('{"prompt": "a", "logit_bias": {"300": 1}}', "line 1: logit_bias has token 300, .* vocabulary is of 300"),
        ('{"prompt": "a", "priority": 1e400}', "line 1: priority is inf; give a whole number"),
        ('{"prompt": "a", "n": [1]}', "line 1: n is .1.; give a whole number"),
        ('{"prompt": "a", "n": 999999}', "line 1: n is 999999; it must lie between 1 and 128"),
        ('{"prompt": "a", "temprature": 0}', "line 1: temprature is no setting; did you mean temperature"),
        ('{"prompt": "a", "max_new_tokens": 9}', "line 1: max_new_tokens has no effect here; use max_tokens"),
        ('{"prompt": "a", "tools": []}', "line 1: tools has no effect here; leave it out"),
        ('{"prompt": null}', "line 1 needs one of prompt, tokens and messages"),
        ('{"prompt": "a", "adapter": "none"}', "line 1: there is no adapter 'none'"),
        ('{"prompt": "a", "guided_regex": "(("}', "line 1: the regex that the answer must follow is refused"),
        ('{"prompt": "a", "response_format": {"type": "xml"}}', "line 1: response_format is of type .xml."),
        (
            '{"prompt": "a", "response_format": {"type": "json_schema"}}',
            "line 1: response_format is of type json_schema",
        ),
        ('{"messages": 3}', "line 1: messages is 3; give a list"),
        ('{"tokens": "abc"}', "line 1: tokens is 'abc'; give a list"),
        ('{"tokens": [1e400]}', "line 1: a token is inf; give a whole number"),
        ('{"tokens": [9999]}', "line 1: the prompt has token 9999"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(
    model: Decoder, tokenizer: Tokenizer, tmp_path: Path, text: str, expected: str
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(text)
    with pytest.raises(UserError, match=expected):
        answer_prompts(Engine(model, tokenizer, CONFIG), read_prompts(source), target, SAMPLING)
    assert not target.exists()


def test_settings_of_lines_are_checked_without_a_model(tmp_path: Path) -> None:
    """A model may take minutes to load. What else a line has is the user's own, and null is what a table lacks."""
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a", "tokens": null, "id": null, "top_p": null, "n": null, "answer": 5}\n"b"')
    prompts = read_prompts(source)
    check_settings(prompts, SAMPLING)
    assert [prompt.id for prompt in prompts] == ["1", "2"]
    source.write_text('"b"\n{"prompt": "a", "n": 0}')
    with pytest.raises(UserError, match="line 2: n is 0"):
        check_settings(read_prompts(source), SAMPLING)


@pytest.mark.parametrize(
    "content",
    ['{"something": "else"}\n', "a note without a line break", '{"id": "1", "prompt": "a"}\n', '{"id": "1"}', "[1]\n"],
)
def test_files_that_are_not_ours_are_left_alone(
    model: Decoder, tokenizer: Tokenizer, tmp_path: Path, content: str
) -> None:
    """Also one whose only line has no end, and the prompts themselves."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"id": "1", "prompt": "a"}\n')
    target.write_text(content)
    with pytest.raises(UserError, match="no output of ours"):
        answer_prompts(Engine(model, tokenizer, CONFIG), read_prompts(source), target, SAMPLING)
    with pytest.raises(UserError, match="no output of ours"):
        answer_prompts(Engine(model, tokenizer, CONFIG), read_prompts(source), source, SAMPLING)
    assert target.read_text() == content
    assert source.read_text() == '{"id": "1", "prompt": "a"}\n'


def test_names_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        read_prompts(tmp_path / "missing")
    with pytest.raises(UserError, match="character device"):
        read_prompts(Path("/dev/zero"))
    with pytest.raises(UserError, match="Is a directory"):
        read_finished(tmp_path)


def test_an_output_has_one_writer_at_a_time(model: Decoder, tokenizer: Tokenizer, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n')
    with locked_beside(target), pytest.raises(UserError, match=rf"out.jsonl is being written by process {os.getpid()}"):
        answer_prompts(Engine(model, tokenizer, CONFIG), read_prompts(source), target, SAMPLING)
    assert not target.exists()
    assert answer_prompts(Engine(model, tokenizer, CONFIG), read_prompts(source), target, SAMPLING) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_a_link_has_the_lock_of_what_it_leads_to(model: Decoder, tokenizer: Tokenizer, tmp_path: Path) -> None:
    source, target, link = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "link.jsonl"
    source.write_text('{"prompt": "a"}\n')
    link.symlink_to(target)
    with locked_beside(target), pytest.raises(UserError, match=r"link.jsonl is being written by process"):
        answer_prompts(Engine(model, tokenizer, CONFIG), read_prompts(source), link, SAMPLING)
    assert answer_prompts(Engine(model, tokenizer, CONFIG), read_prompts(source), link, SAMPLING) == 1
    assert len(lines(target)) == 1


def test_what_another_wrote_before_the_lock_is_compared_with_what_is_asked(
    model: Decoder, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that came between the look and the lock was kept, whatever it answered."""
    source, other, target = tmp_path / "in.jsonl", tmp_path / "other.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    other.write_text('{"prompt": "something else"}\n')

    @contextmanager
    def locked_late(output: Path) -> Iterator[None]:
        monkeypatch.setattr("tightfit.serve.offline.locked_beside", locked_beside)
        answer_prompts(Engine(model, tokenizer, CONFIG), read_prompts(other), output, SAMPLING)
        with locked_beside(output):
            yield

    monkeypatch.setattr("tightfit.serve.offline.locked_beside", locked_late)
    with pytest.raises(UserError, match=r"line 1: the answer to '1' in .*out.jsonl is to another"):
        answer_prompts(Engine(model, tokenizer, CONFIG), read_prompts(source), target, SAMPLING)
    assert [line["id"] for line in lines(target)] == ["1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "other.jsonl", "out.jsonl"]


def test_a_full_disk_is_a_sentence_and_what_is_answered_stays(
    model: Decoder, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(f'{{"prompt": "number {i}"}}\n' for i in range(6)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
    try:
        with pytest.raises(UserError, match=r"cannot write .*out.jsonl: File too large; make room and run the same"):
            answer_prompts(Engine(model, tokenizer, CONFIG), read_prompts(source), target, SAMPLING)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    before = len(read_finished(target).asked)
    assert 0 < before < 6
    assert answer_prompts(Engine(model, tokenizer, CONFIG), read_prompts(source), target, SAMPLING) == 6 - before
    assert len(lines(target)) == 6
