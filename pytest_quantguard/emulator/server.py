"""The emulator's HTTP routes: SGLang's, answered from an Engine, and one of its own that switches faults.

Each handler reads a request, hands it to the dispatcher and lays out the answer; what is allowed is decided
in protocol.py, how answers look in encoding.py, how the process starts and ends in launch.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

from pytest_quantguard.emulator.extra import explanation

try:
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send
except ImportError as error:
    raise ImportError(explanation([str(error.name)])) from error

from pytest_quantguard.emulator import openai_protocol as openai
from pytest_quantguard.emulator import server_info
from pytest_quantguard.emulator.dispatch import Dispatcher, Outcome
from pytest_quantguard.emulator.encoding import encode_answer
from pytest_quantguard.emulator.http_io import (
    ClientGoneError,
    error_response,
    event,
    guarded_events,
    json_response,
    read_json,
    unless_disconnected,
)
from pytest_quantguard.emulator.metrics import Metrics
from pytest_quantguard.emulator.options import EmulatorOptions
from pytest_quantguard.emulator.protocol import (
    GENERATE_FIELDS,
    GenerateCall,
    HttpError,
    Limits,
    parse_generate,
    rejected,
    schema_error,
)
from pytest_quantguard.emulator.running import RunningModel
from pytest_quantguard.emulator.tokenizer import TextTokenizer
from pytest_quantguard.errors import ConfigError, QuantguardError, RequestRejectedError

Handler = Callable[[Request], Awaitable[Response]]

FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting "
    "requests, the operation will not be performed.)\n"
)


class EmulatorServer:
    """The application: `serve` is called when the model is loaded, `drain` when the process shall end."""

    def __init__(self, options: EmulatorOptions) -> None:
        self.options = options
        self.metrics = Metrics(options.served_name)
        self._running: RunningModel | None = None
        self._dispatcher: Dispatcher | None = None
        self._draining = False
        self.app = Starlette(
            routes=[
                Route(path, self.guard(handler), methods=list(methods))
                for path, methods, handler in self.table()
            ],
            exception_handlers={HTTPException: detail_response},
        )
        self.asgi: ASGIApp = Gate(self.app, options.api_key)

    def serve(self, running: RunningModel) -> None:
        """From now on requests are answered."""
        self._dispatcher = Dispatcher(running.engine, running.tokenizer, self.metrics)
        self._running = running

    def drain(self) -> None:
        """From now on requests are refused; health checks say so."""
        self._draining = True

    def abort_all(self) -> None:
        """End every sequence that still runs."""
        if self._dispatcher is not None:
            self._dispatcher.abort("")

    @property
    def busy(self) -> bool:
        """Whether a sequence is queued or running."""
        return self._running is not None and any(self._running.engine.load())

    async def close(self, seconds: float) -> None:
        """End the engine; give up waiting for its current pass after `seconds`."""
        if self._running is not None:
            stopping = threading.Thread(target=self._running.engine.stop, daemon=True)
            stopping.start()
            await asyncio.to_thread(stopping.join, seconds)

    def table(self) -> list[tuple[str, tuple[str, ...], Handler]]:
        """All routes."""
        get, post, both = ("GET",), ("POST",), ("GET", "POST")
        return [
            ("/generate", ("POST", "PUT"), self.generate),
            ("/health", get, self.health),
            ("/ping", get, self.health),
            ("/health_generate", get, self.health_generate),
            ("/server_info", get, self.server_info),
            ("/get_server_info", get, self.server_info),
            ("/model_info", get, self.model_info),
            ("/get_model_info", get, self.model_info),
            ("/v1/models", get, self.models),
            ("/v1/loads", get, self.loads),
            ("/v1/completions", post, self.completions),
            ("/v1/chat/completions", post, self.chat),
            ("/tokenize", post, self.tokenize),
            ("/v1/tokenize", post, self.tokenize),
            ("/detokenize", post, self.detokenize),
            ("/v1/detokenize", post, self.detokenize),
            ("/flush_cache", both, self.flush_cache),
            ("/abort_request", post, self.abort_request),
            ("/metrics", get, self.render_metrics),
            ("/openapi.json", get, self.openapi),
            ("/quantguard/faults", both, self.faults),
        ]

    def guard(self, handler: Handler) -> Handler:
        """A handler whose refusals become responses."""

        async def guarded(request: Request) -> Response:
            try:
                if self._draining:
                    raise rejected("The server is shutting down.", 503)
                return await handler(request)
            except HttpError as error:
                return error_response(error)
            except QuantguardError as error:
                status = 400 if isinstance(error, (ConfigError, RequestRejectedError)) else 500
                return error_response(rejected(str(error), status))
            except ClientGoneError:
                return Response(status_code=499)

        return guarded

    @property
    def running(self) -> RunningModel:
        """The loaded model. HttpError 503 before it is loaded."""
        if self._running is None:
            raise rejected("The server is starting.", 503)
        return self._running

    @property
    def dispatcher(self) -> Dispatcher:
        """The running model's dispatcher."""
        if self._dispatcher is None:
            raise rejected("The server is starting.", 503)
        return self._dispatcher

    @property
    def tokenizer(self) -> TextTokenizer:
        """The running model's tokenizer. HttpError if the folder has none."""
        if self.running.tokenizer is None:
            raise openai.openai_error(
                "this model folder has no tokenizer.json: only /generate with input_ids works"
            )
        return self.running.tokenizer

    # Generation

    async def generate(self, request: Request) -> Response:
        """POST /generate."""
        received = time.time()
        body = await read_json(request)
        try:
            call = await run_in_threadpool(self.parse, body)
        except HttpError as error:
            if error.in_stream and body.get("stream") is True:
                return stream(guarded_events(refusal(error)))
            raise
        if call.stream:
            return stream(guarded_events(self.generate_events(call, received)))
        outcomes = await unless_disconnected(request, self.dispatcher.run(call, received))
        return await run_in_threadpool(self.generate_response, outcomes, call.single)

    def parse(self, body: Any) -> GenerateCall:
        """A decoded /generate body as a call."""
        running = self.running
        encode = None if running.tokenizer is None else running.tokenizer.encode
        limits = Limits(running.served.vocab_size, running.served.context_length, encode)
        return parse_generate(body, limits)

    def answer(self, outcome: Outcome) -> dict[str, Any]:
        """The answer object of one outcome."""
        tokenizer = self.running.tokenizer
        text_of = None if tokenizer is None else tokenizer.token_text
        answer = encode_answer(outcome.item, outcome.result, outcome.text, outcome.timing, text_of)
        answer["meta_info"]["response_sent_to_client_ts"] = time.time()
        return answer

    def generate_response(self, outcomes: list[Outcome], single: bool) -> Response:
        """The whole answer; on a worker thread, since a large one takes a while."""
        try:
            answers = [self.answer(outcome) for outcome in outcomes]
        except HttpError as error:
            return error_response(error)
        return json_response(answers[0] if single else answers)

    async def generate_events(self, call: GenerateCall, received: float) -> AsyncGenerator[bytes, None]:
        """Cumulative events; those of a batch carry their index."""
        updates = self.dispatcher.updates(call, received, every_token=True)
        async with contextlib.aclosing(updates):
            async for outcome in updates:
                answer = self.answer(outcome)
                if not call.single:
                    answer["index"] = outcome.index
                yield event(answer)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        body = await read_json(request)
        return await self.openai_response(request, body, openai.completion_to_generate(body), chat=False)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = await read_json(request)
        return await self.openai_response(
            request, body, openai.chat_to_generate(body, self.tokenizer), chat=True
        )

    async def openai_response(
        self, request: Request, body: dict[str, Any], generate: dict[str, Any], *, chat: bool
    ) -> Response:
        """Run a translated request and translate its answer back."""
        received, tokenizer = time.time(), self.tokenizer
        try:
            call = await run_in_threadpool(self.parse, generate)
        except HttpError as error:
            raise openai.openai_error(str(error), error.status) from error
        if call.stream:
            return stream(guarded_events(self.openai_events(body, call, received, chat)))
        outcomes = await unless_disconnected(request, self.dispatcher.run(call, received))
        answers = [self.answer(outcome) for outcome in outcomes]
        translate = openai.chat_answer if chat else openai.completion_answer
        return json_response(translate(body, outcomes, answers, tokenizer))

    async def openai_events(
        self, body: dict[str, Any], call: GenerateCall, received: float, chat: bool
    ) -> AsyncGenerator[bytes, None]:
        """Events with the text that is new; a part of a character waits for the rest."""
        sent = [""] * len(call.items)
        started = [False] * len(call.items)
        final: list[Outcome] = []
        updates = self.dispatcher.updates(call, received, every_token=True)
        async with contextlib.aclosing(updates):
            async for outcome in updates:
                ended = outcome.result.finish_reason is not None
                text = outcome.text if ended else outcome.text.rstrip("\ufffd")
                delta = text[len(sent[outcome.index]) :]
                if ended:
                    final.append(outcome)
                if not (delta or ended):
                    continue
                first = not started[outcome.index]
                sent[outcome.index], started[outcome.index] = text, True
                for chunk in openai.stream_chunks(body, outcome, delta, chat=chat, first=first):
                    yield event(chunk)
        if (body.get("stream_options") or {}).get("include_usage"):
            final.sort(key=lambda outcome: outcome.index)
            yield event(openai.usage_chunk(body, final, chat=chat))

    # State

    async def health(self, _request: Request) -> Response:
        """GET /health: whether requests are answered."""
        return Response(status_code=503 if self._running is None else 200)

    async def health_generate(self, request: Request) -> Response:
        """GET /health_generate: 200 once a token was generated."""
        if self._running is None:
            return Response(status_code=503)
        call = self.parse({"input_ids": [0], "sampling_params": {"temperature": 0, "max_new_tokens": 1}})
        try:
            await unless_disconnected(request, self.dispatcher.run(call, time.time()))
        except HttpError:
            return Response(status_code=503)
        return Response(status_code=200)

    async def server_info(self, _request: Request) -> Response:
        """GET /server_info."""
        running = self.running
        info = server_info.server_info(self.options, running.served, running.faults, running.engine.load())
        return json_response(info)

    async def model_info(self, _request: Request) -> Response:
        """GET /model_info."""
        return json_response(server_info.model_info(self.options, self.running.served))

    async def models(self, _request: Request) -> Response:
        """GET /v1/models."""
        return json_response(server_info.models(self.options, self.running.served))

    async def loads(self, _request: Request) -> Response:
        """GET /v1/loads."""
        return json_response(server_info.loads(self.options, self.running.engine.load()))

    async def render_metrics(self, _request: Request) -> Response:
        """GET /metrics."""
        running, queued = self.running.engine.load()
        gauges = {
            "num_running_reqs": running,
            "num_queue_reqs": queued,
            "context_len": self.running.served.context_length,
        }
        return Response(self.metrics.render(gauges), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, _request: Request) -> Response:
        """GET /openapi.json."""
        routes = {path: list(methods) for path, methods, _ in self.table()}
        return json_response(server_info.openapi(routes, GENERATE_FIELDS))

    # Text

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: {"prompt": text or [text]} or {"messages": [...]}."""
        body = await read_json(request)
        return await run_in_threadpool(self.tokens_of, body)

    def tokens_of(self, body: Any) -> Response:
        """The answer of /tokenize; on a worker thread, since a long text takes a while."""
        openai.check_object(body)
        special = body.get("add_special_tokens", True)
        prompt = body.get("prompt")
        tokens: list[int] | list[list[int]]
        if prompt is None and body.get("messages") is not None:
            tokens = openai.chat_token_ids(body, self.tokenizer)
        elif isinstance(prompt, str):
            tokens = self.tokenizer.encode(prompt, add_special_tokens=bool(special))
        elif isinstance(prompt, list) and all(isinstance(text, str) for text in prompt):
            tokens = [self.tokenizer.encode(text, add_special_tokens=bool(special)) for text in prompt]
        else:
            raise openai.openai_error(f"Invalid prompt type: {type(prompt)}. Expected str or List[str].")
        nested = isinstance(prompt, list)
        count = [len(ids) for ids in tokens if isinstance(ids, list)] if nested else len(tokens)
        return json_response(
            {"tokens": tokens, "count": count, "max_model_len": self.running.served.context_length}
        )

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: {"tokens": [id] or [[id]]}."""
        body = await read_json(request)
        openai.check_object(body)
        tokens = body.get("tokens")
        lists = tokens if isinstance(tokens, list) and tokens and isinstance(tokens[0], list) else [tokens]
        size = self.running.served.vocab_size
        for ids in lists:
            if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < size for i in ids):
                raise openai.openai_error(
                    f"Invalid input: 'tokens' must be a list of integers between 0 and {size - 1}."
                )
        skip = bool(body.get("skip_special_tokens", True))
        texts = [self.tokenizer.decode(ids, skip_special_tokens=skip) for ids in lists]
        return json_response({"text": texts if lists is tokens else texts[0]})

    # Control

    async def flush_cache(self, _request: Request) -> Response:
        """GET or POST /flush_cache."""
        if await run_in_threadpool(self.running.engine.flush_cache):
            return PlainTextResponse(FLUSHED)
        running, queued = self.running.engine.load()
        return PlainTextResponse(
            f"Flush cache failed. #queue-req: {queued}, #running-req: {running}\n", status_code=400
        )

    async def abort_request(self, request: Request) -> Response:
        """POST /abort_request: {"rid": prefix} or {"abort_all": true}."""
        body = await read_json(request)
        if not isinstance(body, dict):
            raise schema_error(None, "Input should be a dictionary or an instance of AbortReq")
        rid = body.get("rid") or ""
        if not isinstance(rid, str):
            raise schema_error("rid", "Input should be a valid string")
        if rid or body.get("abort_all"):
            self.dispatcher.abort("" if body.get("abort_all") else rid)
        return Response(status_code=200)

    async def faults(self, request: Request) -> Response:
        """GET or POST /quantguard/faults: {"faults": [specification]} replaces those that are on."""
        running = self.running
        if request.method == "POST":
            body = await read_json(request)
            wanted = body.get("faults") if isinstance(body, dict) else None
            if not isinstance(wanted, list) or not all(isinstance(entry, str) for entry in wanted):
                raise rejected(
                    'expected {"faults": ["name" or "name:key=value,...", ...]}; [] switches all off'
                )
            await run_in_threadpool(running.switch_faults, tuple(wanted))
        return json_response({"faults": list(running.faults)})


class Gate:
    """In front of the routes: asks for the API key. As in SGLang, health checks and metrics need none."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._expected is not None and not self._admits(scope, self._expected):
            await json_response({"error": "Unauthorized"}, 401)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _admits(self, scope: Scope, expected: bytes) -> bool:
        if scope["path"].startswith(("/health", "/metrics")):
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, expected)


async def detail_response(_request: Request, error: Exception) -> Response:
    """404 and 405 in FastAPI's shape."""
    assert isinstance(error, HTTPException)
    return json_response({"detail": error.detail}, error.status_code)


async def refusal(error: HttpError) -> AsyncGenerator[bytes, None]:
    """A stream that is refused before its first event, as SGLang does it: with status 200."""
    raise error
    yield b""


def stream(events: AsyncIterator[bytes]) -> Response:
    """A response of server-sent events."""
    return StreamingResponse(events, media_type="text/event-stream")
