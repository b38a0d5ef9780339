"""The server through OpenAI's own client and through bare sockets: answers, streams, mistakes, hang-ups."""

import asyncio
import json
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.serve.running import CONFIG, Running, running, serving
from tightfit.models.loading import LoadedModel
from tightfit.models.text.tokenizer import Tokenizer
from tightfit.serve.engine import Engine
from tightfit.serve.http.address import own_names
from tightfit.serve.http.balancer import _summed_metrics
from tightfit.serve.http.guards import Guards, ServerLimits
from tightfit.serve.http.metrics import prometheus
from tightfit.serve.requests.grammar import Constraints, Grammar
from tightfit.serve.requests.request import Request
from tightfit.serve.requests.sampling import Sampling
from tightfit.serve.service import Service, TokenRate

HELLO: Any = [{"role": "user", "content": "the quick brown fox"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"n": {"enum": [1, 2]}},
            "required": ["n"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def server(loaded: LoadedModel) -> Iterator[Running]:
    with serving(loaded, CONFIG, ServerLimits(body_bytes=100_000)) as made:
        yield made


def post(server: Running, path: str, body: bytes, **headers: str) -> tuple[int, Any]:
    request = urllib.request.Request(server.url + path, body, {"content-type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def get(server: Running, path: str) -> str:
    with urllib.request.urlopen(server.url + path, timeout=60) as response:
        return str(response.read().decode())


def wait_until(holds: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.01)


def test_a_chat_is_what_the_engine_says(client: openai.OpenAI, loaded: LoadedModel) -> None:
    made = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=12, temperature=0)
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.encode(tokenizer.render_chat(HELLO, add_generation_prompt=True), parse_special=True)
    sampling = Sampling(max_tokens=12, temperature=0, stop_ids=tokenizer.stop_ids)
    direct = Engine(loaded.model, tokenizer, CONFIG).generate([Request(id="a", prompt=prompt, sampling=sampling)])
    assert made.choices[0].message.content == direct["a"][0].text
    assert made.choices[0].finish_reason in ("length", "stop")
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (len(prompt), len(direct["a"][0].tokens))


def test_a_stream_adds_up_to_the_whole(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 20, "seed": 4, "n": 2, "temperature": 1.2}
    whole = client.chat.completions.create(**asked)
    texts, reasons, usage = ["", ""], [None, None], None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_completions_take_texts_and_tokens(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    texts = ["numbers such as", "def add("]
    asked: Any = {"model": "tiny", "max_tokens": 6, "temperature": 0}
    both = client.completions.create(prompt=texts, **asked)
    assert [choice.index for choice in both.choices] == [0, 1]
    for index, text in enumerate(texts):
        one = client.completions.create(prompt=tokenizer.encode(text), **asked, logprobs=2, echo=True)
        assert one.choices[0].text == text + both.choices[index].text
        assert one.choices[0].logprobs is not None
        assert len(one.choices[0].logprobs.tokens or []) == len(tokenizer.encode(text)) + 6
    parts = ["", ""]
    for chunk in client.completions.create(prompt=texts, **asked, stream=True):
        parts[chunk.choices[0].index] += chunk.choices[0].text
    assert parts == [choice.text for choice in both.choices]


def test_a_bias_decides(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    wanted = tokenizer.encode("the")[0]
    asked: Any = {"model": "tiny", "prompt": "a", "max_tokens": 3, "temperature": 0, "logit_bias": {str(wanted): 100}}
    assert client.completions.create(**asked).choices[0].text == tokenizer.decode([wanted] * 3)


def test_logprobs_come_with_their_tokens(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        extra_body={"ignore_eos": True},
    )
    found = made.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert len(found.content) == 4
    for each in found.content:
        assert [top.logprob for top in each.top_logprobs] == sorted(
            (t.logprob for t in each.top_logprobs), reverse=True
        )
        assert each.token == each.top_logprobs[0].token


def test_answers_of_a_given_form(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 22]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    made = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=200,
        temperature=1,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    )
    assert made.choices[0].finish_reason == "stop"
    assert json.loads(made.choices[0].message.content or "")["n"] in (1, 22)
    chosen = client.completions.create(
        model="tiny", prompt="a", max_tokens=30, extra_body={"guided_regex": "(left|right) [0-9]"}
    )
    assert chosen.choices[0].text[:-2] in ("left", "right")


def test_a_form_is_read_while_others_are_listened_to(
    server: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading one waits here until the server has answered somebody else."""
    reading, answered = threading.Event(), threading.Event()
    begin = Constraints._begin

    def slow(self: Constraints, grammar: Grammar) -> object:
        reading.set()
        assert answered.wait(timeout=60), "nobody is listened to meanwhile"
        return begin(self, grammar)

    monkeypatch.setattr(Constraints, "_begin", slow)
    with ThreadPoolExecutor(1) as beside:
        asked = {"model": "tiny", "prompt": "a", "max_tokens": 9, "extra_body": {"guided_regex": "never|before"}}
        form = beside.submit(lambda: client.completions.create(**asked))
        try:
            assert reading.wait(timeout=60)
            assert client.completions.create(model="tiny", prompt="a", max_tokens=2).choices[0].finish_reason
        finally:
            answered.set()
        assert form.result().choices[0].text in ("never", "before")


def test_a_forced_call_is_a_call(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model="tiny", messages=HELLO, tools=[TOOL], tool_choice="required", max_tokens=200, temperature=0
    )
    calls: Any = made.choices[0].message.tool_calls
    call = calls[0]
    assert made.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "add"
    assert json.loads(call.function.arguments)["n"] in (1, 2)
    names = [
        call.function.name
        for chunk in client.chat.completions.create(
            model="tiny", messages=HELLO, tools=[TOOL], tool_choice="required", max_tokens=200, stream=True
        )
        for call in chunk.choices[0].delta.tool_calls or []
        if call.function
    ]
    assert names == ["add"]


def test_models_health_metrics_and_the_page(server: Running, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    assert json.loads(get(server, "/health")) == {"status": "ok"}
    text = get(server, "/metrics")
    assert "# TYPE tightfit_requests_total counter" in text
    assert f"tightfit_cache_blocks {server.service.engine.pool.size}" in text
    page = get(server, "/")
    assert "<title>tightfit</title>" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page


def test_large_counters_are_written_to_the_last_digit(loaded: LoadedModel) -> None:
    """Of one server, and summed over copies."""
    engine = Engine(loaded.model, loaded.tokenizer, CONFIG)
    engine.counts.answer_tokens = 123_456_789
    text = prometheus(Service(engine))
    assert "tightfit_answer_tokens_total 123456789\n" in text
    assert "tightfit_answer_tokens_total 246913578\n" in _summed_metrics([text, text])


def test_the_rate_of_tokens_remembers_its_window_alone() -> None:
    rate = TokenRate(window_s=0.05)
    for tokens in (500, 700):
        rate.add(tokens)
    assert rate.per_second() == 1200 / 0.05
    time.sleep(0.06)
    rate.add(7)
    assert len(rate._seen) == 1
    assert rate.per_second() == 7 / 0.05


BAD_BODIES: list[tuple[str, bytes, int]] = [
    ("/v1/chat/completions", b"", 400),
    ("/v1/chat/completions", b"{", 400),
    ("/v1/chat/completions", b"[]", 400),
    ("/v1/chat/completions", b"\xff\xfe", 400),
    ("/v1/chat/completions", b"[" * 50_000, 400),
    ("/v1/chat/completions", b'{"messages": []}', 400),
    ("/v1/chat/completions", b'{"messages": "hi"}', 400),
    ("/v1/chat/completions", b'{"messages": [{}]}', 400),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": 3}]}', 400),
    ("/v1/chat/completions", b'{"messages": [{"role": "\\ud800", "content": "\\ud800"}], "model": "\\ud800"}', 404),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}', 400),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "n": 1000}', 400),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "top_p": 7}', 400),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', 400),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"}', 400),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "seed": 9223372036854775808}', 400),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "logit_bias": {"x": 1}}', 400),
    ("/v1/completions", b'{"prompt": "a", "guided_json": {"type": 5}}', 400),
    ("/v1/completions", b'{"prompt": "a", "response_format": {"type": "json_schema"}}', 400),
    ("/v1/completions", b'{"prompt": [[1, 2], [100000]]}', 400),
    ("/v1/completions", b'{"prompt": []}', 400),
    ("/v1/completions", b'{"prompt": [[]]}', 400),
    ("/v1/completions", b'{"prompt": "a", "max_tokens": 0}', 400),
    ("/v1/completions", b'{"prompt": "a", "max_tokens": 1e400}', 400),
    ("/v1/completions", b'{"prompt": "a", "stop": [""]}', 400),
    ("/v1/completions", b'{"prompt": "a", "guided_regex": "(("}', 400),
    ("/v1/completions", b'{"prompt": "' + b"x " * 2000 + b'"}', 400),
    ("/v1/completions", b'{"prompt": "a", "model": "other"}', 404),
    ("/v1/completions", b'{"prompt": "' + b"x" * 100_000 + b'"}', 413),
    ("/v1/embeddings", b'{"input": []}', 400),
    ("/v1/embeddings", b'{"input": ""}', 400),
    ("/v1/embeddings", b'{"input": ["a", ""]}', 400),
    ("/v1/embeddings", b'{"input": [[-1]]}', 400),
    ("/v1/embeddings", b'{"input": "a", "dimensions": 7}', 400),
    ("/v1/nothing", b"{}", 404),
]


def test_malformed_requests_are_refused_with_a_sentence(server: Running) -> None:
    for path, body, status in BAD_BODIES:
        found, answer = post(server, path, body)
        assert found == status, (path, body[:100], found, answer)
        assert answer["error"]["message"], body[:100]
        streamed, _ = post(server, path, body.replace(b"{", b'{"stream": true, ', 1)) if b": " in body else (400, None)
        assert 400 <= streamed < 500, body[:100]
    assert post(server, "/v1/completions", b'{"prompt": "\\ud800 a", "max_tokens": 1, "echo": true}')[0] == 200
    server.wait_until_idle()


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (
            "/v1/completions",
            b"{'prompt': 'a'}",
            "the body is not JSON: Expecting property name enclosed in double quotes, at character 1",
        ),
        ("/v1/completions", b'{"prompt": [null]}', "prompt: item 0 is not a whole number"),
        (
            "/v1/chat/completions",
            b'{"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 0}',
            "max_completion_tokens: Input should be greater than or equal to 1",
        ),
    ],
)
def test_what_is_wrong_with_a_body_is_said_in_words(server: Running, path: str, body: bytes, said: str) -> None:
    assert post(server, path, body)[1]["error"]["message"] == said


def test_a_client_that_hangs_up_frees_everything(server: Running) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 240, "ignore_eos": True, "stream": True, "n": 3}).encode()
    for stream in (True, False):
        text = body if stream else body.replace(b'"stream": true', b'"stream": false')
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
            connection.sendall(f"content-length: {len(text)}\r\n\r\n".encode() + text)
            until = time.monotonic() + 20
            while not server.service.engine.pool.used and time.monotonic() < until:
                time.sleep(0.001)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        server.wait_until_idle()


def test_a_slow_reader_holds_nobody_up(server: Running, client: openai.OpenAI) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True, "logprobs": 5}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        slow.sendall(f"content-length: {len(body)}\r\n\r\n".encode() + body)
        for _ in range(3):
            made = client.completions.create(model="tiny", prompt="b", max_tokens=8, temperature=0)
            assert made.usage is not None
        server_engine = server.service.engine
        until = time.monotonic() + 20
        while server_engine.pool.used:  # its blocks are free once it is computed, read or not
            assert time.monotonic() < until
            time.sleep(0.01)
    server.wait_until_idle()


def test_a_hundred_streams_at_once(server: Running) -> None:
    async def one(client: openai.AsyncOpenAI, index: int) -> int:
        stream = await client.completions.create(
            model="tiny",
            prompt=f"{index}:",
            max_tokens=10,
            stream=True,
            seed=index,
            extra_body={"ignore_eos": True},
            stream_options={"include_usage": True},
        )
        tokens = 0
        async for chunk in stream:
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
            if index % 10 == 9 and chunk.choices and chunk.choices[0].text:
                await stream.close()
                return -1
        return tokens

    async def everyone() -> list[int]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, index) for index in range(100)))

    assert asyncio.run(everyone()) == [-1 if index % 10 == 9 else 10 for index in range(100)]
    server.wait_until_idle()


def test_keys_and_limits(loaded: LoadedModel) -> None:
    engine = Engine(loaded.model, loaded.tokenizer, CONFIG)
    limits = ServerLimits(api_key="secret", requests=0, request_seconds=0.05)
    with running(loaded, engine, limits) as server:
        body = b'{"prompt": "a", "max_tokens": 2}'
        assert post(server, "/v1/completions", body)[0] == 401
        assert post(server, "/v1/completions", body, authorization="Bearer wrong")[0] == 401
        assert post(server, "/v1/completions", body, authorization="Bearer secret")[0] == 429
        assert json.loads(get(server, "/health")) == {"status": "ok"}
        server.service.most_requests = 1
        status, answer = post(server, "/v1/completions", b'{"prompt": ["a", "b"]}', authorization="Bearer secret")
        assert (status, "there are 2 prompts; give 1 to 1" in str(answer)) == (400, True)
        slow = b'{"prompt": "a", "max_tokens": 200, "n": 8, "ignore_eos": true}'
        assert post(server, "/v1/completions", slow, authorization="Bearer secret")[0] == 504
        server.wait_until_idle()


@pytest.mark.parametrize(
    ("name", "status"),
    [("127.0.0.1:80", 200), ("LocalHost", 200), ("[::1]:8000", 200), ("site.example:8000", 403), ("127.0.0.1.a", 403)],
)
def test_a_server_of_this_machine_answers_to_its_own_names(name: str, status: int) -> None:
    """Without starting one: what stands before the routes is asked."""

    async def asked(limits: ServerLimits) -> int:
        seen: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})

        async def receive() -> Any:
            raise AssertionError("a GET has no body")

        async def send(message: Any) -> None:
            seen.append(message)

        scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": [(b"host", name.encode())]}
        await Guards(app, limits)(scope, receive, send)
        return int(seen[0]["status"])

    assert asyncio.run(asked(ServerLimits(names=own_names("127.0.0.1")))) == status
    assert asyncio.run(asked(ServerLimits(names=own_names("0.0.0.0")))) == 200


@pytest.mark.parametrize("begun", [False, True])
def test_an_answer_that_outlasts_the_server_is_no_traceback(begun: bool) -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        seen.append(message)

    async def cut_off() -> None:
        scope = {"type": "http", "method": "GET", "path": "/health", "headers": []}
        task = asyncio.create_task(Guards(app, ServerLimits())(scope, None, send))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        task.cancel()
        await task

    asyncio.run(cut_off())
    assert [each["status"] for each in seen if each["type"] == "http.response.start"] == [200 if begun else 503]


def test_the_names_of_a_server_are_those_of_where_it_listens() -> None:
    assert own_names("localhost") == own_names("127.0.0.1") == {"localhost", "127.0.0.1", "[::1]"}
    assert own_names("127.0.0.2") > {"127.0.0.2"}
    assert own_names("::1") == own_names("localhost")
    assert own_names("192.168.0.7") == own_names("box.example") == own_names("::") == frozenset()


def test_a_dead_engine_is_said_and_seen(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(loaded.model, loaded.tokenizer, CONFIG)

    def broken() -> None:
        raise RuntimeError("out of luck")

    with running(loaded, engine) as server:
        monkeypatch.setattr(engine, "step", broken)
        status, answer = post(server, "/v1/completions", b'{"prompt": "a"}')
        assert status == 503
        assert "out of luck" in answer["error"]["message"]
        assert post(server, "/v1/completions", b'{"prompt": "a"}')[0] == 503
        with pytest.raises(urllib.error.HTTPError, match="503"):
            get(server, "/health")
