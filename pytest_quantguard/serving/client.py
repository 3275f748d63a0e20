"""A typed client of one SGLang-like server: one call of `generate` is one HTTP request and one batch.

Requests are checked before they are sent and answers before they are returned, so that callers only ever see
arrays that belong to what they asked.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from pytest_quantguard.errors import InvalidAnswerError, RequestRejectedError, ServerError
from pytest_quantguard.serving import forced
from pytest_quantguard.serving.answers import Answer, Capabilities, ChatAnswer, ChatRequest, GenerateRequest
from pytest_quantguard.serving.chat import chat_body, read_chat_answer
from pytest_quantguard.serving.payload import (
    check_batch,
    decode_steps,
    generate_body,
    longest_answer,
    longest_text,
)
from pytest_quantguard.serving.probe import read_capabilities
from pytest_quantguard.serving.reading import is_count, parse_json, read_answers, split_answers
from pytest_quantguard.serving.transport import StatusError, Transport, backoff
from pytest_quantguard.serving.unlikely_ids import unlikely_ids

FLUSH_SECONDS = 10.0
TOKENIZER_SECONDS = 60.0
"""Longest wait for text of token ids, or ids of text: no model is asked."""


class Client:
    """Speaks to the server at `url`. Not thread-safe: one per thread.

    vocab_size: number of logits, including padding rows; needed for log-probabilities. `probe` fills it in
    where the server or its model folder says.
    context_length: most tokens of prompt and answer together; None leaves that check to the server.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        request_timeout: float = 600,
        vocab_size: int | None = None,
        context_length: int | None = None,
    ) -> None:
        self.transport = Transport(url, api_key=api_key, request_timeout=request_timeout)
        self.url = self.transport.url
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.capabilities: Capabilities | None = None
        self._unlikely_ids: tuple[int, ...] | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. The server runs on."""
        self.transport.close()

    def generate(self, batch: Sequence[GenerateRequest], *, top_logprobs: int = 0) -> list[Answer]:
        """Send `batch` as one request and return one checked answer per prompt, in order.

        top_logprobs: K; a server that returns fewer is taken at its word (the arrays are narrower).
        Raises RequestRejectedError (refused here or there), InvalidAnswerError, ServerDiedError, ServerError.
        """
        if self.vocab_size is None and self.capabilities is None:
            self.probe()
        check_batch(
            batch, top_logprobs=top_logprobs, vocab_size=self.vocab_size, context_length=self.context_length
        )
        if batch[0].forced_ids is not None:
            return self._generate_forced(batch, top_logprobs)
        body = generate_body(batch, top_logprobs=top_logprobs)
        items = self._ask(body, batch, top_logprobs)
        return read_answers(items, batch, top_logprobs=top_logprobs, vocab_size=self._known_vocab_size(body))

    def chat(self, request: ChatRequest) -> ChatAnswer:
        """Answer a conversation through the server's own chat template. Raises as `generate` does."""
        what = (
            f"/v1/chat/completions with {len(request.messages)} messages, {request.max_new_tokens} new tokens"
        )
        body = self.transport.post(
            "/v1/chat/completions", chat_body(request), what=what, limit=longest_text(request.max_new_tokens)
        )
        return read_chat_answer(parse_json(body, "the answer of /v1/chat/completions"), request)

    def abort(self, rid: str) -> None:
        """End a request that was sent with this `rid`, from another thread; nothing happens if none runs."""
        self.transport.post("/abort_request", {"rid": rid}, what="POST /abort_request")

    def sibling(self, *, request_timeout: float | None = None) -> Client:
        """Another client of the same server, for another thread; it knows what this one knows."""
        other = Client(self.url, vocab_size=self.vocab_size, context_length=self.context_length)
        other.transport = self.transport.sibling(request_timeout=request_timeout)
        other.capabilities = self.capabilities
        return other

    def flush_cache(self) -> None:
        """Empty the prefix cache. A server that is still busy refuses and is asked again for a while."""
        deadline = time.monotonic() + FLUSH_SECONDS
        for wait in backoff():
            try:
                self.transport.post("/flush_cache", {}, what="POST /flush_cache")
            except StatusError as error:
                if error.status in (404, 405) or time.monotonic() + wait > deadline:
                    raise
                time.sleep(wait)
            else:
                return

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text` by the server's own tokenizer."""
        payload = {"model": "default", "prompt": text, "add_special_tokens": add_special_tokens}
        answer = self._ask_either(("/tokenize", "/v1/tokenize"), payload, "POST /tokenize")
        tokens = answer.get("tokens")
        if not isinstance(tokens, list) or not all(map(is_count, tokens)):
            raise InvalidAnswerError(f"/tokenize answered without a list of token ids: {str(answer)[:200]}")
        return tokens

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, special tokens included."""
        payload = {"model": "default", "tokens": list(token_ids), "skip_special_tokens": False}
        answer = self._ask_either(("/detokenize", "/v1/detokenize"), payload, "POST /detokenize")
        text = answer.get("text")
        if not isinstance(text, str):
            raise InvalidAnswerError(f"/detokenize answered without text: {str(answer)[:200]}")
        return text

    def probe(self) -> Capabilities:
        """Ask the server what it is and can do, and remember it.

        Fills in `vocab_size` and `context_length` where they were not given.
        """
        found = read_capabilities(self.transport)
        self.capabilities = found
        self.vocab_size = self.vocab_size or found.vocab_size
        self.context_length = self.context_length or found.context_length
        return found

    def _generate_forced(self, batch: Sequence[GenerateRequest], top_logprobs: int) -> list[Answer]:
        way = (self.capabilities or self.probe()).forced_decode
        if way is None:
            raise RequestRejectedError(
                f"{self.url} offers no forced decode; start it with server_args: "
                f"{{enable_custom_logit_processor: true}} "
                "and without speculative decoding, or use suite.decode_mode: resync"
            )
        if way == "emulator_field":
            body = generate_body(batch, top_logprobs=top_logprobs) | forced.emulator_fields(batch)
            items = self._ask(body, batch, top_logprobs)
            answers = read_answers(
                items, batch, top_logprobs=top_logprobs, vocab_size=self._known_vocab_size(body)
            )
            forced.check_forced(answers, batch)
            return answers
        return self._generate_with_processor(batch, top_logprobs)

    def _generate_with_processor(self, batch: Sequence[GenerateRequest], top_logprobs: int) -> list[Answer]:
        asked = top_logprobs
        vocab_size = self._known_vocab_size({"top_logprobs_num": 1})
        if top_logprobs > 0:
            asked = min(top_logprobs + forced.EXTRA_LOGPROBS, vocab_size)
        slots = forced.choose_slots(batch, self._sacrificed_ids())
        body = forced.processor_fields(generate_body(batch, top_logprobs=asked), batch, slots)
        items = self._ask(body, batch, top_logprobs)
        answers = read_answers(items, batch, top_logprobs=asked, vocab_size=vocab_size)
        forced.check_forced(answers, batch)
        return [
            forced.restore(
                answer,
                item,
                pair,
                place=f"prompt {index} of a batch of {len(batch)}",
                top_logprobs=top_logprobs,
            )
            for index, (answer, item, pair) in enumerate(zip(answers, items, slots, strict=True))
        ]

    def _sacrificed_ids(self) -> tuple[int, ...]:
        if self._unlikely_ids is None:
            model_path = self.capabilities.model_path if self.capabilities is not None else None
            self._unlikely_ids = unlikely_ids(
                self.transport, model_path, self._known_vocab_size({"top_logprobs_num": 1})
            )
        return self._unlikely_ids

    def _ask(self, body: dict[str, Any], batch: Sequence[GenerateRequest], top_logprobs: int) -> list[Any]:
        answer = self.transport.post(
            "/generate",
            body,
            what=describe(batch, top_logprobs),
            limit=longest_answer(batch, top_logprobs=body.get("top_logprobs_num", 0)),
        )
        return split_answers(answer, batch)

    def _ask_either(self, routes: Sequence[str], payload: dict[str, Any], what: str) -> dict[str, Any]:
        """POST to the first route that exists (older versions know the first name only)."""
        timeout = min(TOKENIZER_SECONDS, self.transport.request_timeout)
        for route in routes[:-1]:
            try:
                return self._json_object(
                    self.transport.post(route, payload, what=what, timeout=timeout), route
                )
            except StatusError as error:
                if error.status != 404:
                    raise
        return self._json_object(
            self.transport.post(routes[-1], payload, what=what, timeout=timeout), routes[-1]
        )

    def _json_object(self, body: bytes, route: str) -> dict[str, Any]:
        value = parse_json(body, f"the answer of {route}")
        if not isinstance(value, dict):
            raise InvalidAnswerError(f"{route} answered a {type(value).__name__} where an object is expected")
        return value

    def _known_vocab_size(self, body: dict[str, Any]) -> int:
        if self.vocab_size is not None:
            return self.vocab_size
        if body.get("return_logprob") or body.get("top_logprobs_num"):
            raise ServerError(
                f"the vocabulary size of the model at {self.url} is unknown: its config.json is not on "
                "this machine. "
                "Put the model where model_path says, or download its config.json into the Hugging Face cache"
            )
        return np.iinfo(np.int32).max


def describe(batch: Sequence[GenerateRequest], top_logprobs: int) -> str:
    """A request in one line, for messages."""
    lengths = [len(request.input_ids) for request in batch]
    tokens = f"{lengths[0]}" if min(lengths) == max(lengths) else f"{min(lengths)} to {max(lengths)}"
    steps = max(decode_steps(request) for request in batch)
    prompts = "1 prompt" if len(batch) == 1 else f"{len(batch)} prompts"
    return f"/generate with {prompts} of {tokens} tokens, {steps} new tokens, top {top_logprobs}"
