"""Requests that are no mistake and no everyday thing either: endless prompts, extreme settings, odd characters."""

import json
from typing import Any

import openai
import pytest
import torch
from fastapi.exceptions import RequestValidationError

from tests.covering import sampled
from tests.serve.running import CONFIG, Running, running
from tests.serve.test_server import HELLO, TOOL, post
from tightfit.errors import UserError
from tightfit.models.loading import LoadedModel
from tightfit.models.text.tokenizer import Tokenizer
from tightfit.serve.engine import Engine
from tightfit.serve.http.answers import Writer
from tightfit.serve.http.crowded import MOST_LISTS, MOST_VALUES, crowded
from tightfit.serve.http.guards import ServerLimits
from tightfit.serve.http.protocol import NO_ECHO, CompletionBody
from tightfit.serve.http.streaming import event
from tightfit.serve.http.tools import CallStream, found_calls
from tightfit.serve.requests.request import Answer, TokenLogprob
from tightfit.serve.requests.sampling import Sampling
from tightfit.serve.sampling.sampler import probabilities


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x " * 200_000}),
        ("/v1/completions", {"prompt": ["a", "x " * 200_000]}),
        ("/v1/completions", {"prompt": ["a"] * 65}),
        ("/v1/completions", {"prompt": [[]] * 65}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 200_000}]}),
        ("/v1/embeddings", {"input": "x " * 200_000}),
        ("/v1/embeddings", {"input": ["a"] * 65}),
    ],
)
def test_what_cannot_fit_is_refused_before_it_is_cut_into_tokens(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """Tokens of megabytes take seconds, for one client or for all."""
    encode = Tokenizer.encode

    def short_only(self: Tokenizer, text: str, **options: Any) -> list[int]:
        assert len(text) < 1000, "encoded all the same"
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", short_only)
    status, answer = post(server, path, json.dumps(body).encode())
    assert status == 400
    assert "shorten" in answer["error"]["message"] or "give 1 to 64" in answer["error"]["message"]


def test_echo_of_every_prompt_whole_and_streamed(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    texts = ["numbers such as", "def add("]
    asked: Any = {"model": "tiny", "max_tokens": 3, "temperature": 0, "n": 2}
    plain = [choice.text for choice in client.completions.create(prompt=texts, **asked).choices]
    wanted = [texts[index // 2] + text for index, text in enumerate(plain)]
    for prompt in (texts, [tokenizer.encode(text) for text in texts]):
        whole = client.completions.create(prompt=prompt, **asked, echo=True)
        assert [choice.text for choice in whole.choices] == wanted
    parts = ["", "", "", ""]
    for chunk in client.completions.create(prompt=texts, **asked, echo=True, stream=True):
        parts[chunk.choices[0].index] += chunk.choices[0].text
    assert parts == wanted


def test_what_would_change_the_answer_and_is_not_done_is_refused(server: Running) -> None:
    beyond = (b'"logit_bias": {"300": 1}', "logit_bias has token 300, but the model's vocabulary is of 300 tokens")
    for more, word in ((b'"best_of": 3', "best_of"), (b'"suffix": "b"', "suffix"), beyond):
        status, answer = post(server, "/v1/completions", b'{"prompt": "a", "max_tokens": 1, ' + more + b"}")
        assert status == 400
        assert word in answer["error"]["message"]
    unasked = json.dumps({"messages": HELLO, "top_logprobs": 3}).encode()
    status, answer = post(server, "/v1/chat/completions", unasked)
    assert (status, "top_logprobs is 3, but logprobs is not true" in answer["error"]["message"]) == (400, True)
    fine = b'{"prompt": "a", "max_tokens": 1, "best_of": 2, "n": 2, "suffix": null}'
    assert post(server, "/v1/completions", fine)[0] == 200


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 1e-40},
        {"temperature": 1e-6},
        {"top_p": 1e-300},
        {"top_p": 1e-300, "top_k": 7},
        {"min_p": 1.0},
        {"logit_bias": {5: 100, 6: -100}},
        {"repetition_penalty": 0.01, "temperature": 1e-40},
    ],
)
def test_extreme_settings_give_distributions(extreme: dict[str, Any]) -> None:
    """Where float32 has no such number, the next best: the likeliest token, never none."""
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)) * 20
    made = probabilities(logits, [Sampling(**extreme)])
    assert float(made.sum()) == pytest.approx(1)
    assert int(made.argmax()) == int(logits.argmax())
    assert float(probabilities(logits, [Sampling(typical_p=1e-300)]).sum()) == pytest.approx(1)


def test_a_failure_before_the_first_token_of_a_stream_has_its_status(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = b'{"prompt": "a", "stream": true, "max_tokens": 4}'
    engine = Engine(loaded.model, loaded.tokenizer, CONFIG)
    with running(loaded, engine, ServerLimits(request_seconds=1e-9)) as server:
        assert post(server, "/v1/completions", body)[0] == 504
        assert post(server, "/v1/completions", body.replace(b'"a"', b'["a", "b"]'))[0] == 504

        def broken() -> None:
            raise RuntimeError("out of luck")

        monkeypatch.setattr(engine, "step", broken)
        server.service._put(lambda engine: engine.step())
        server.service._thread.join(20)
        assert post(server, "/v1/completions", body)[0] == 503


def test_characters_that_some_clients_take_for_the_end_of_a_line() -> None:
    told = "one\u2028two\u2029three\x85four\nfive"
    text = event({"text": told})
    assert len(text.strip().splitlines()) == 1
    assert json.loads(text.removeprefix("data: "))["text"] == told


def test_bytes_of_tokens_that_are_parts_of_characters(tokenizer: Tokenizer) -> None:
    """They put a character together again, and keep their names apart."""
    parts = tokenizer.encode("日")
    assert len(parts) == 3
    logprobs = tuple(TokenLogprob(token, -1.0, tuple((other, -1.0) for other in parts)) for token in parts)
    answer = Answer(parts, "日", list(logprobs), "length")
    chat = Writer("m", tokenizer, chat=True)._choice(0, answer, NO_ECHO)["logprobs"]["content"]
    assert bytes(byte for each in chat for byte in each["bytes"]).decode() == "日"
    plain = Writer("m", tokenizer, chat=False)._choice(0, answer, NO_ECHO)["logprobs"]
    assert plain["tokens"] == ["bytes:\\xe6", "bytes:\\x97", "bytes:\\xa5"]
    assert [len(each) for each in plain["top_logprobs"]] == [3, 3, 3]
    assert tokenizer.token_bytes(tokenizer.encode("the")[0]) == b"the"


def test_a_call_whose_name_is_no_text_is_none() -> None:
    """Half a surrogate pair, which JSON may say and UTF-8 cannot."""
    for name in ("\\ud800", "a\\u0000b"):
        said = f'{{"name": "{name}", "arguments": {{}}}}'
        assert found_calls(said) == (said, [])
    assert found_calls('{"name": "añ", "arguments": {"b": "\\ud800"}}')[1][0]["function"]["name"] == "añ"


def test_several_calls_may_come_at_once() -> None:
    """Each in its marks, or as one list, marked or not; a list of anything else is text."""
    one, two = '{"name": "add", "arguments": {"n": 1}}', '{"name": "add", "parameters": {"n": [2]}}'
    marked = f"Both: <tool_call>{one}</tool_call>\n<tool_call>\n{two}\n</tool_call>"
    for text, rest in ((marked, "Both:"), (f"<tool_call>[{one}, {two}]</tool_call>", ""), (f"[{one}, {two}]", "")):
        found, calls = found_calls(text)
        assert (found, [json.loads(call["function"]["arguments"]) for call in calls]) == (rest, [{"n": 1}, {"n": [2]}])
        assert len({call["id"] for call in calls}) == 2
    for text in ("[]", "[1]", f"[{one}, 1]", f"<tool_call>[{one}, 1]</tool_call>"):
        assert found_calls(text) == (text, [])


@pytest.mark.parametrize("tools", [1, 2])
def test_parameters_may_refer_to_parts_of_themselves(client: openai.OpenAI, tools: int) -> None:
    """As pydantic writes them; tools may use one name for different parts."""
    offered: Any = []
    for place in range(tools):
        parameters: Any = {
            "type": "object",
            "properties": {"n": {"$ref": "#/$defs/P"}},
            "$defs": {"P": {"const": place}},
        }
        parameters |= {"required": ["n"], "additionalProperties": False}
        offered.append({"type": "function", "function": {"name": f"f{place}", "parameters": parameters}})
    made = client.chat.completions.create(
        model="tiny", messages=HELLO, tools=offered, tool_choice="required", max_tokens=60
    )
    call: Any = (made.choices[0].message.tool_calls or [])[0]
    assert json.loads(call.function.arguments) == {"n": int(call.function.name[-1])}


def test_top_k_is_off_as_clients_of_vllm_say_it(tokenizer: Tokenizer) -> None:
    assert CompletionBody(top_k=-1).sampling(tokenizer, 5, None).top_k == 0
    with pytest.raises(UserError, match="top_k is -2"):
        CompletionBody(top_k=-2).sampling(tokenizer, 5, None)


def test_fields_may_be_null_and_seeds_negative(server: Running) -> None:
    """OpenAI's interface has them so, and some clients send every field."""
    nulls: Any = dict.fromkeys(("n", "stream", "logprobs", "stop", "tools", "ignore_eos", "priority", "seed"))
    asked = {"messages": HELLO, "max_tokens": 2, "temperature": 1}
    assert post(server, "/v1/chat/completions", json.dumps(asked | nulls).encode())[0] == 200
    seeds = [-(2**63), -1, 0, 2**63 - 1, 2**63, -(2**63) - 1]
    answers = [post(server, "/v1/chat/completions", json.dumps(asked | {"seed": seed}).encode()) for seed in seeds]
    assert [status for status, _ in answers] == [200] * 4 + [400] * 2
    for body, word in (({"n": 0}, "n:"), ({"n": 129}, "n:")):
        status, answer = post(server, "/v1/chat/completions", json.dumps(asked | body).encode())
        assert (status, answer["error"]["message"].startswith(word)) == (400, True)
    assert post(server, "/v1/embeddings", b'{"input": [[1, true]]}')[0] == 400


CALL = '{"name": "f", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("said", "soon"),
    [
        ("a text, of some words", "a text, of some words"),
        (" \n and <tool_ and < more", " \n and <tool_ and < more"),
        (f"first <tool_call>{CALL}</tool_call>", "first "),
        (f"first<tool_call>{CALL}</tool_call>then <tool_call>{CALL}", "first"),
        ("first <tool_call>{nothing}</tool_call> then", "first "),
        (CALL, ""),
        (f"[{CALL}, {CALL}]", ""),
        ("[1] is a list", ""),
        ("ends in <tool", "ends in "),
        ("", ""),
    ],
)
def test_text_that_is_no_call_is_shown_as_it_comes(said: str, soon: str) -> None:
    for cut in range(1, max(len(said), 2)):
        stream = CallStream()
        shown = "".join(stream.push(said[at : at + cut]) for at in range(0, len(said), cut))
        assert shown == soon
        rest, calls = stream.finish()
        wanted, wanted_calls = found_calls(said)
        assert (shown + rest).strip() == wanted.strip()
        assert [each["function"] for each in calls] == [each["function"] for each in wanted_calls]


def test_a_stream_that_may_be_a_call_comes_in_pieces(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": HELLO, "tools": [TOOL], "max_tokens": 24, "temperature": 0}
    asked["extra_body"] = {"ignore_eos": True, "logit_bias": {"60": -100}}
    whole = client.chat.completions.create(**asked).choices[0]
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    texts = [text for chunk in chunks if (text := chunk.delta.content)]
    assert "".join(texts) == whole.message.content
    assert len(texts) > 10
    assert chunks[-1].finish_reason == whole.finish_reason == "length"


def test_a_stream_that_may_be_a_call_has_its_log_probabilities(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": "tiny",
        "messages": HELLO,
        "tools": [TOOL],
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": True,
    }
    whole = client.chat.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0]
    assert whole.logprobs is not None
    pieces = [
        each
        for chunk in client.chat.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
        if chunk.choices[0].logprobs is not None
        for each in chunk.choices[0].logprobs.content or ()
    ]
    assert [each.token for each in pieces] == [each.token for each in whole.logprobs.content or ()]
    assert len(pieces) == 6


def test_settings_reach_the_chat_template(
    client: openai.OpenAI, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = f"{{% if louder %}}louder{{% endif %}}{tokenizer.chat_template}"
    monkeypatch.setattr(tokenizer._wrapped, "chat_template", template)
    asked: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 1}
    lengths = []
    for settings in (
        None,
        {"louder": True},
        {"louder": False, "messages": [], "self": 1, "add_generation_prompt": False},
    ):
        made = client.chat.completions.create(**asked, extra_body={"chat_template_kwargs": settings})
        assert made.usage is not None
        lengths.append(made.usage.prompt_tokens)
    assert lengths == [lengths[0], lengths[0] + len(tokenizer.encode("louder")), lengths[0]]


MIB = 2**20
CROWDED = {
    "lists": b'{"prompt": [' + b"[]," * (2 * MIB) + b"[]]}",
    "objects": b'{"messages": [' + b"{}," * (2 * MIB) + b"{}]}",
    "tokens": b'{"prompt": [' + b"1," * (3 * MIB) + b"1]}",
    "texts": b'{"prompt": [' + b'"[",' * (2 * MIB - 99) + b'"["]}',
    "not UTF-8": '{"prompt": "∀"}'.encode("utf-16-le"),
}


@pytest.mark.parametrize("name", CROWDED)
def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(
    server: Running, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def parsed(*_: Any) -> None:
        raise AssertionError("parsed all the same")

    monkeypatch.setattr("starlette.requests.Request.json", parsed)
    status, answer = post(server, "/v1/completions", CROWDED[name])
    assert status == 400
    assert "the body" in answer["error"]["message"]


@sampled(2)
@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        '"[' * 200_000,
        r"\"[,{" * 200_000,
        "\\" * 99_999 + '"[[' * 100_000,
        '"' * 99_999 + "," * MIB,
        "〔∀\u5b00\u2200," * 100_000,
    ],
)
def test_texts_may_be_of_brackets_alone(text: str) -> None:
    assert crowded(json.dumps({"messages": [{"role": "user", "content": text}]}).encode()) is None
    assert crowded(json.dumps({"a": text, "b": [1] * MOST_VALUES}, ensure_ascii=False).encode()) is not None
    assert crowded(json.dumps([text] * 3 + [[[]] * (MOST_LISTS - 2)]).encode()) is None
    assert crowded(json.dumps([text] * 3 + [[[]] * (MOST_LISTS - 1)]).encode()) is not None


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/chat/completions", {"messages": [1] * 300_000}, "messages: "),
        ("/v1/chat/completions", {"messages": HELLO, "tools": [{}] * 60_000}, "tools: "),
        ("/v1/chat/completions", {"messages": HELLO, "stop": [1] * 300_000}, "stop: "),
        ("/v1/chat/completions", {"messages": HELLO, "logit_bias": dict.fromkeys(map(str, range(99_999)))}, "logit"),
        ("/v1/completions", {"prompt": [[1.5] * 300_000]}, "prompt: "),
        ("/v1/completions", {"prompt": [1] + [None] * 300_000}, "prompt: "),
        ("/v1/embeddings", {"input": [["a"] * 300_000]}, "input: "),
    ],
)
def test_many_mistakes_are_one(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], said: str
) -> None:
    """A sentence for each of 300,000 kept all other clients waiting for seconds."""
    seen = []
    errors = RequestValidationError.errors
    monkeypatch.setattr(RequestValidationError, "errors", lambda self: seen.append(len(errors(self))) or errors(self))
    status, answer = post(server, path, json.dumps(body).encode())
    assert (status, seen) == (400, [1])
    assert answer["error"]["message"].startswith(said)
