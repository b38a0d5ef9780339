"""The routes: chats, completions, embeddings, models, health, metrics, and a page to chat on."""

import asyncio
import base64
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import resources
from typing import Any, TypeVar

import numpy as np
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from torch import Tensor

from tightfit import __version__
from tightfit.errors import UserError
from tightfit.models.embedding import embed
from tightfit.models.text.tokenizer import Tokenizer
from tightfit.serve.engine import Engine
from tightfit.serve.http.answers import Usage, Writer, error_body
from tightfit.serve.http.conversation import chat_tokens
from tightfit.serve.http.guards import Guards, ServerLimits
from tightfit.serve.http.hang_up import until_gone
from tightfit.serve.http.metrics import prometheus, stats
from tightfit.serve.http.protocol import (
    COMPLETION_TOKENS,
    MOST_PROMPTS,
    ChatBody,
    CompletionBody,
    Echo,
    EmbeddingBody,
    as_token_lists,
    echoed,
)
from tightfit.serve.http.streaming import ClientRequest, EventStream, streamed
from tightfit.serve.http.tools import forced_grammar, offered
from tightfit.serve.prompt_logprobs import prompt_logprobs
from tightfit.serve.requests.request import Answer
from tightfit.serve.requests.request import Request as EngineRequest
from tightfit.serve.service import EngineDiedError, OverloadedError, Service

CLIENT_GONE = 499
Made = TypeVar("Made")


@dataclass(frozen=True)
class Served:
    """The model that an application serves."""

    name: str
    service: Service
    tokenizer: Tokenizer
    limits: ServerLimits = field(default_factory=ServerLimits)
    on_failure: Callable[[], None] = lambda: None
    began: int = field(default_factory=lambda: int(time.time()))

    @property
    def names(self) -> list[str]:
        """The model's name, then those of its adapters."""
        return [self.name, *self.service.engine.adapters]

    def adapter_of(self, asked: str) -> str | None:
        """The adapter that a client names as its model; None for the model itself, 404 for an unknown name."""
        if asked in ("", self.name):
            return None
        if asked not in self.service.engine.adapters:
            raise HTTPException(404, f"there is no model {asked!r} here; there are {', '.join(self.names)}")
        return asked


def make_app(served: Served) -> Guards:
    """The application that serves one model."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        served.service.start(asyncio.get_running_loop(), served.on_failure)
        yield
        served.service.stop()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, title="tightfit", version=__version__)
    _add_errors(app)
    _add_numbers(app, served)
    _add_generation(app, served)
    return Guards(app, served.limits)


def _add_errors(app: FastAPI) -> None:
    """Answer clients' mistakes with a 4xx status and a sentence in OpenAI's error object."""

    def answer(status: int, kind: str) -> Callable[[Request, Any], JSONResponse]:
        return lambda _, error: JSONResponse(error_body(str(error), kind), status)

    def malformed(_: Request, error: Any) -> JSONResponse:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            told = f"the body is not JSON: {first['ctx']['error']}, at character {first['loc'][-1]}"
            return JSONResponse(error_body(told), 400)
        place = ".".join(str(part) for part in first["loc"] if part != "body")
        told = first["msg"].removeprefix("Value error, ")
        return JSONResponse(error_body(f"{place or 'the body'}: {told}"), 400)

    def http(_: Request, error: Any) -> JSONResponse:
        return JSONResponse(error_body(str(error.detail)), error.status_code, headers=error.headers)

    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(UserError, answer(400, "invalid_request_error"))
    app.add_exception_handler(OverloadedError, answer(429, "rate_limit_error"))
    app.add_exception_handler(EngineDiedError, answer(503, "server_error"))
    app.add_exception_handler(TimeoutError, lambda *_: JSONResponse(error_body("it took too long", "timeout"), 504))


def _add_numbers(app: FastAPI, served: Served) -> None:
    service = served.service  # which is for the event loop: routes that read it are coroutines

    @app.get("/")
    def page() -> HTMLResponse:
        return HTMLResponse(resources.files(__package__).joinpath("page.html").read_text("utf-8"))

    @app.get("/health")
    async def health() -> JSONResponse:
        if service.failure is not None:
            return JSONResponse({"status": "dead"}, 503)
        return JSONResponse({"status": "draining" if service.draining else "ok"}, 503 if service.draining else 200)

    @app.get("/stats")
    async def numbers() -> dict[str, Any]:
        return stats(service)

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(prometheus(service), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    @app.get("/v1/models/", include_in_schema=False)
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [_described(served, name) for name in served.names]}

    @app.get("/v1/models/{name:path}")
    def model(name: str) -> dict[str, Any]:
        return _described(served, served.adapter_of(name) or served.name)


def _add_generation(app: FastAPI, served: Served) -> None:
    tokenizer, longest = served.tokenizer, served.service.engine.max_length

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        adapter = served.adapter_of(body.model)
        if body.max_completion_tokens is not None:
            body.max_tokens = body.max_completion_tokens
        sampling = body.sampling(tokenizer, longest, body.asked_logprobs(), forced_grammar(body))
        prompts = [await asyncio.to_thread(chat_tokens, body, tokenizer, longest)]
        writer = Writer(adapter or served.name, tokenizer, chat=True, reads_calls=bool(offered(body)))
        return await _answered(served, ClientRequest(body, prompts, sampling, writer, adapter), request)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        adapter = served.adapter_of(body.model)
        prompts = await asyncio.to_thread(as_token_lists, body.prompt, tokenizer, longest)
        most = min(MOST_PROMPTS, max(served.service.most_requests, 1))  # each is a request to the engine
        if not 1 <= len(prompts) <= most:
            raise UserError(f"there are {len(prompts)} prompts; give 1 to {most}")
        body.refuse_undone()
        settings = body.model_copy(update={"max_tokens": 1}) if body.is_silent else body
        sampling = settings.sampling(tokenizer, COMPLETION_TOKENS, body.logprobs)
        writer = Writer(adapter or served.name, tokenizer, chat=False)
        texts = echoed(body.prompt, tokenizer) if body.echo else []
        asked = ClientRequest(body, prompts, sampling, writer, adapter, texts=texts)
        return await _answered(served, asked, request)

    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingBody, request: Request) -> Response:
        if served.adapter_of(body.model) is not None:
            raise UserError(f"model is {body.model!r}, an adapter; embeddings are those of {served.name}")
        return JSONResponse(await until_gone(request.receive, _in_time(served, _embedded(served, body))))


async def _answered(served: Served, asked: ClientRequest, request: Request) -> Response:
    """The answers as one object, or as a stream."""
    for each in asked.requests:
        await served.service.check(each)
    if asked.body.stream:
        events = _events(served, asked)
        # A failure before the first token can still be sent as an HTTP status.
        first = await until_gone(request.receive, _first(events))
        return Response(status_code=CLIENT_GONE) if first is None else EventStream(first, events)
    whole = await until_gone(request.receive, _whole(served, asked))
    return Response(status_code=CLIENT_GONE) if whole is None else JSONResponse(whole)


async def _events(served: Served, asked: ClientRequest) -> AsyncGenerator[str, None]:
    """The events of a stream."""
    with served.service.admitted(len(asked.requests)):
        asked = await _with_echoes(served, asked)
        async with contextlib.aclosing(streamed(served.service, asked, served.limits.request_seconds)) as events:
            async for each in events:
                yield each


async def _whole(served: Served, asked: ClientRequest) -> dict[str, Any]:
    """The response with all answers; with the echoed prompts alone where `max_tokens` is 0."""
    with served.service.admitted(len(asked.requests)):
        asked = await _with_echoes(served, asked)
        if asked.is_silent:
            answers = [Answer(finish="length") for _ in range(len(asked.prompts) * asked.body.n)]
        else:
            answers = await _gathered(served.service, asked.requests, served.limits.request_seconds)
    usage = Usage(sum(map(len, asked.prompts)))
    usage.answer = sum(len(answer.tokens) for answer in answers)
    usage.cached = sum(answer.cached for answer in answers[:: asked.body.n])
    return asked.writer.whole(answers, usage, asked.echo)


async def _in_time(served: Served, work: Coroutine[Any, Any, Made]) -> Made:
    """What `work` returns; a TimeoutError where a request may not take that long."""
    async with asyncio.timeout(served.limits.request_seconds):
        return await work


async def _with_echoes(served: Served, asked: ClientRequest) -> ClientRequest:
    """The request with what its answers begin with, if anything."""
    return replace(asked, echoes=await _in_time(served, _echoes(served, asked))) if asked.texts else asked


async def _echoes(served: Served, asked: ClientRequest) -> tuple[Echo, ...]:
    """What answers begin with: the prompts, with their log probabilities where those are asked for."""
    top = asked.sampling.logprobs
    if top is None:
        return tuple(map(Echo, asked.texts))
    if asked.adapter is not None:
        raise UserError(f"model is {asked.adapter!r}, an adapter; echo with logprobs is of {served.name} alone")
    found = []
    for text, tokens in zip(asked.texts, asked.prompts, strict=True):  # one at a time, so that answers under way go on
        logprobs = await served.service.call(partial(prompt_logprobs, tokens, top))
        found.append(Echo(text, tokens, logprobs))
    return tuple(found)


async def _gathered(service: Service, requests: list[EngineRequest], seconds: float) -> list[Answer]:
    """All answers to all prompts; one failure cancels the others."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(service.answers(each, seconds)) for each in requests]
    return [answer for task in tasks for answer in task.result()]


async def _first(events: AsyncIterator[str]) -> str:
    return await anext(events)


async def _embedded(served: Served, body: EmbeddingBody) -> dict[str, Any]:
    engine = served.service.engine
    if engine.spread:
        raise UserError("embeddings need a model that is whole on one rank; serve it without --tensor and --pipeline")
    if body.input == "" or (isinstance(body.input, list) and "" in body.input):
        raise UserError("input has an empty text; give texts with something in them")
    texts = await asyncio.to_thread(as_token_lists, body.input, served.tokenizer, engine.max_length)
    if not 1 <= len(texts) <= MOST_PROMPTS:
        raise UserError(f"input has {len(texts)} texts; give 1 to {MOST_PROMPTS}")
    for tokens in texts:
        _check_text(tokens, engine.model.spec.vocab_size, engine.max_length)
    width = engine.model.spec.hidden_size
    if body.dimensions not in (None, width):
        raise UserError(f"dimensions is {body.dimensions}, but this model has {width}")
    with served.service.admitted():
        # One text at a time between steps, so that answers under way go on.
        rows = [(await served.service.call(partial(_embed_one, tokens)))[0] for tokens in texts]
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(row.numpy(), body.encoding_format)}
        for index, row in enumerate(rows)
    ]
    count = sum(len(tokens) for tokens in texts)
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": data, "model": served.name, "usage": usage}


def _embed_one(tokens: list[int], engine: Engine) -> Tensor:
    return embed(engine.model, [tokens])


def _check_text(tokens: list[int], vocab_size: int, longest: int) -> None:
    if not tokens or len(tokens) > longest:
        raise UserError(f"input has a text of {len(tokens)} tokens; give 1 to {longest}")
    if bad := [token for token in tokens if not 0 <= token < vocab_size]:
        raise UserError(f"input has token {bad[0]}, but the model's vocabulary ends at {vocab_size - 1}")


def _encoded(row: "np.ndarray[Any, Any]", form: str) -> list[float] | str:
    return row.tolist() if form == "float" else base64.b64encode(row.astype("<f4").tobytes()).decode()


def _described(served: Served, name: str) -> dict[str, Any]:
    longest = served.service.engine.max_length
    return {
        "id": name,
        "root": served.name,
        "parent": None if name == served.name else served.name,
        "object": "model",
        "created": served.began,
        "owned_by": "tightfit",
        "max_model_len": longest,
    }
