"""What a `/generate` body may hold, checked and turned into engine requests.

Field names, defaults, messages and the three shapes of error bodies are those of SGLang 0.5.23, except that
requests which would end a real server are refused here. Pure functions: no HTTP, no engine, no answers
(encoding.py).
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pytest_quantguard.emulator.sampling_fields import SamplingParameters, described, parse_sampling
from pytest_quantguard.emulator.sequences import SequenceRequest

MAX_SEQUENCES = 4096
"""Prompts times samples of one request; SGLang has no such limit."""

Json = Any
Encode = Callable[[str], list[int]]

GENERATE_FIELDS = (
    "text", "input_ids", "sampling_params", "rid", "return_logprob", "logprob_start_len", "top_logprobs_num",
    "token_ids_logprob", "return_text_in_logprobs", "return_flat_raw_top_logprobs",
    "return_flat_raw_output_top_logprobs", "return_flat_raw_top_logprobs_b64", "stream", "forced_output_ids",
)  # fmt: skip
"""Top-level fields that have a meaning here; `forced_output_ids` is the emulator's own."""

UNSUPPORTED_FIELDS = (
    "audio_data", "image_data", "video_data", "lora_path", "return_hidden_states", "return_routed_experts",
    "return_sampling_mask", "session_id", "session_params", "watermark", "decision_layout",
)  # fmt: skip
"""Top-level fields that would change an answer and that the emulator lacks; unknown ones are ignored."""


class HttpError(Exception):
    """A request that is answered with an error status and a JSON body."""

    def __init__(self, status: int, body: dict[str, Json], message: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = body

    @property
    def in_stream(self) -> bool:
        """Whether a client that asked for a stream is told in one: checks of values, not of the schema."""
        return isinstance(self.body.get("error"), dict)


def rejected(message: str, status: int = 400) -> HttpError:
    """SGLang's shape for a request that its checks refuse."""
    return HttpError(status, {"error": {"message": message}}, message)


def contract_error(message: str) -> HttpError:
    """SGLang's shape for a sampling parameter that does not exist or has another type."""
    return HttpError(400, {"error": message}, message)


def schema_error(field: str | None, message: str, status: int = 400) -> HttpError:
    """SGLang's (and OpenAI's) shape for a body that is not what the route takes."""
    place = f"('body', '{field}')" if field else "('body',)"
    text = f"1 validation error:\n  {{'loc': {place}, 'msg': '{message}'}}"
    kind = {400: "Bad Request"}.get(status, "Error")
    body = {"object": "error", "message": text, "type": kind, "param": None, "code": status}
    return HttpError(status, body, text)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the served model can take. context_length is in tokens; encode is None without a tokenizer."""

    vocab_size: int
    context_length: int
    encode: Encode | None


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How one answer is laid out."""

    return_logprob: bool
    top_logprobs_num: int
    selected: bool
    text_in_logprobs: bool
    flat_input: bool
    flat_output: bool
    base64: bool


@dataclass(frozen=True, slots=True)
class GenerateItem:
    """One sequence of a call: what the engine runs, where text ends it, and how its answer looks."""

    request: SequenceRequest
    sampling: SamplingParameters
    options: AnswerOptions


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A whole `/generate` body. single: an object is answered, not a list."""

    items: tuple[GenerateItem, ...]
    single: bool
    stream: bool


def parse_generate(body: Json, limits: Limits) -> GenerateCall:
    """Check a decoded body. Raises HttpError, with the status and the body of the answer."""
    if not isinstance(body, dict):
        raise schema_error(None, "Input should be a dictionary or an instance of GenerateReqInput")
    refuse_unsupported(body)
    flags = flat_flags(body)
    stream = flag(body, "stream")
    if stream and flags["return_flat_raw_output_top_logprobs"]:
        raise rejected(
            "return_flat_raw_output_top_logprobs is only set on the finished response and does not support "
            "stream=True."
        )
    prompts, one = prompts_of(body, limits)
    reader = ItemReader(body, prompts, one, limits, flags)
    items = reader.items()
    duplicates = [rid for rid, count in Counter(item.request.rid for item in items).items() if count > 1]
    if duplicates:
        raise rejected(f"Duplicate request IDs detected within the request: {duplicates}")
    return GenerateCall(items=items, single=one and len(items) == 1, stream=stream)


def refuse_unsupported(body: Mapping[str, Json]) -> None:
    """Fields that the emulator must not ignore silently."""
    if body.get("custom_logit_processor"):
        raise rejected(
            "custom_logit_processor is refused: the emulator never loads serialized code. To force the "
            "generated tokens send forced_output_ids: [token id, ...] (for a batch, a list per prompt); "
            "the log-probabilities stay the model's own."
        )
    if body.get("input_embeds") is not None:
        raise rejected("input_embeds is not supported by the emulator; send input_ids.")
    for name in UNSUPPORTED_FIELDS:
        if body.get(name):
            raise rejected(f"{name} is not supported by the emulator.")


def flat_flags(body: Mapping[str, Json]) -> dict[str, bool]:
    """The three flags of the flat layout."""
    names = (
        "return_flat_raw_top_logprobs",
        "return_flat_raw_output_top_logprobs",
        "return_flat_raw_top_logprobs_b64",
    )
    flags = {name: flag(body, name) for name in names}
    if flags[names[2]] and not (flags[names[0]] or flags[names[1]]):
        raise rejected(
            "return_flat_raw_top_logprobs_b64 requires return_flat_raw_top_logprobs or "
            "return_flat_raw_output_top_logprobs."
        )
    return flags


def prompts_of(body: Mapping[str, Json], limits: Limits) -> tuple[list[list[int]], bool]:
    """The prompts as token ids, and whether one was given, not a batch. `input_ids` wins over `text`."""
    input_ids, text = body.get("input_ids"), body.get("text")
    if input_ids is not None:
        if not isinstance(input_ids, list):
            raise schema_error("input_ids", f"Value error, must be list or null; got {kind_of(input_ids)}")
        if not input_ids or input_ids[0] == []:
            raise rejected("input_ids cannot be empty.")
        one = not isinstance(input_ids[0], list)
        prompts = [input_ids] if one else input_ids
    elif text is not None:
        one = isinstance(text, str)
        texts = [text] if one else text
        if not isinstance(texts, list) or not all(isinstance(entry, str) for entry in texts):
            raise schema_error("text", "Input should be a valid string or a list of strings")
        if limits.encode is None:
            raise rejected("this model folder has no tokenizer.json: send input_ids instead of text.")
        if not texts or not all(texts):
            raise rejected("text cannot be empty.")
        prompts = [limits.encode(entry) for entry in texts]
    else:
        raise rejected("Either text, input_ids or input_embeds should be provided.")
    for prompt in prompts:
        check_token_ids("input_ids", prompt, limits.vocab_size)
        if len(prompt) >= limits.context_length:
            raise rejected(
                f"The input ({len(prompt)} tokens) is longer than the model's context length "
                f"({limits.context_length} tokens)."
            )
    return prompts, one


class ItemReader:
    """Spreads a body's fields over its sequences."""

    def __init__(
        self,
        body: Mapping[str, Json],
        prompts: list[list[int]],
        one: bool,
        limits: Limits,
        flags: dict[str, bool],
    ) -> None:
        self.body, self.prompts, self.one, self.limits, self.flags = body, prompts, one, limits, flags

    def items(self) -> tuple[GenerateItem, ...]:
        """One item per prompt and sample."""
        sampling = [
            parse_sampling(value, contract_error, rejected) for value in self.spread("sampling_params", dict)
        ]
        samples = {parameters.n for parameters in sampling}
        if len(samples) > 1:
            raise rejected("The parallel_sample_num should be the same for all samples in sample params.")
        count = len(self.prompts) * max(samples)
        if count > MAX_SEQUENCES:
            raise rejected(f"at most {MAX_SEQUENCES} sequences are allowed in a request, got {count}.")
        selected = self.selected_ids()
        forced = self.forced_ids()
        rids = self.rids()
        starts = self.spread("logprob_start_len", int)
        tops = self.spread("top_logprobs_num", int)
        wanted = self.spread("return_logprob", bool)
        items: list[GenerateItem] = []
        for i, prompt in enumerate(self.prompts):
            options = self.options(bool(wanted[i]), tops[i] or 0, selected[i] is not None)
            request = self.request(prompt, rids[i], sampling[i], options, starts[i], selected[i], forced[i])
            for sample in range(sampling[i].n):
                single = sampling[i].n == 1
                items.append(
                    GenerateItem(
                        request if single else replace(request, rid=f"{rids[i]}_{sample}"),
                        sampling[i],
                        options,
                    )
                )
        return tuple(items)

    def request(
        self,
        prompt: list[int],
        rid: str,
        sampling: SamplingParameters,
        options: AnswerOptions,
        start: int | None,
        selected: list[int] | None,
        forced: list[int] | None,
    ) -> SequenceRequest:
        """The engine's request for one prompt."""
        steps = self.steps(len(prompt), sampling, forced)
        return SequenceRequest(
            rid=rid,
            input_ids=tuple(prompt),
            max_new_tokens=steps,
            ignore_eos=sampling.ignore_eos or forced is not None,
            stop_token_ids=sampling.stop_token_ids,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            return_logprob=options.return_logprob,
            logprob_start_len=self.start(start, len(prompt)) if options.return_logprob else -1,
            top_logprobs_num=options.top_logprobs_num,
            token_ids_logprob=tuple(selected or ()) if options.return_logprob else (),
            forced_ids=tuple(forced[:steps]) if forced and steps else None,
        )

    def steps(self, length: int, sampling: SamplingParameters, forced: list[int] | None) -> int:
        """Tokens to generate at most: as asked, as forced, as the context has room for."""
        context = self.limits.context_length
        room = context - length
        steps = sampling.max_new_tokens
        if sampling.explicit_length and steps is not None and steps > room:
            raise rejected(
                f"Requested token count exceeds the model's maximum context length of {context} tokens. You "
                f"requested a total of {steps + length} tokens: {length} tokens from the input messages and "
                f"{steps} tokens for the completion. Please reduce the number of tokens in the input "
                "messages or the completion to fit within the limit."
            )
        if forced is None:
            return room if steps is None else min(steps, room)
        if len(forced) > room:
            raise rejected(
                f"forced_output_ids holds {len(forced)} tokens, but only {room} fit after a prompt of "
                f"{length} in a context of {context}."
            )
        return min(steps, len(forced)) if sampling.explicit_length and steps is not None else len(forced)

    def start(self, start: int | None, length: int) -> int:
        """The engine's start: the prompt's own length means no prompt rows, as the default -1 does."""
        if start is None or start in (-1, length):
            return -1
        if start > length:
            raise rejected(
                f"req.logprob_start_len={start} is higher than the number of input tokens "
                f"len(req.origin_input_ids)={length}. Please use a smaller logprob_start_len."
            )
        if start < -1:
            raise rejected(f"logprob_start_len must be at least -1, got {start}.")
        return start

    def options(self, wanted: bool, top: int, selected: bool) -> AnswerOptions:
        """The layout of one answer. A negative number of top log-probabilities is none, as in SGLang."""
        if wanted and top > self.limits.vocab_size:
            raise rejected(
                f"top_logprobs_num={top} is higher than the vocabulary size {self.limits.vocab_size}. "
                "Please use a smaller top_logprobs_num."
            )
        return AnswerOptions(
            return_logprob=wanted,
            top_logprobs_num=max(top, 0) if wanted else 0,
            selected=selected and wanted,
            text_in_logprobs=flag(self.body, "return_text_in_logprobs") and self.limits.encode is not None,
            flat_input=self.flags["return_flat_raw_top_logprobs"],
            flat_output=self.flags["return_flat_raw_output_top_logprobs"],
            base64=self.flags["return_flat_raw_top_logprobs_b64"],
        )

    def rids(self) -> list[str]:
        """A request id per prompt; made up where none is given."""
        rid = self.body.get("rid")
        if rid is None:
            return [uuid.uuid4().hex for _ in self.prompts]
        if isinstance(rid, str):
            return [rid] if self.one else [f"{rid}_{i}" for i in range(len(self.prompts))]
        if not isinstance(rid, list) or not all(isinstance(entry, str) for entry in rid):
            raise rejected("The rid should be a string or a list of strings.")
        if len(rid) != len(self.prompts):
            raise rejected("The specified rids length mismatch with the batch_size for batch processing.")
        return rid

    def spread(self, name: str, kind: type) -> list[Json]:
        """One value of a field per prompt, from one value for all or a list of them."""
        value = self.body.get(name)
        if isinstance(value, list) and not self.one:
            if len(value) != len(self.prompts):
                raise rejected(f"The length of {name} should be equal to the batch size.")
            values = value
        else:
            values = [value] * len(self.prompts)
        for entry in values:
            if entry is not None and type(entry) is not kind:
                if kind is dict:
                    raise schema_error(name, f"Input should be a valid dictionary; got {kind_of(entry)}")
                wanted = {int: "Int64OrList", bool: "BoolOrList"}[kind]
                raise contract_error(
                    f"invalid type: {described(entry)}, expected a value or an array of values for {wanted}"
                )
        return values

    def selected_ids(self) -> list[list[int] | None]:
        """`token_ids_logprob` per prompt."""
        value = self.body.get("token_ids_logprob")
        if value is None:
            return [None] * len(self.prompts)
        nested = isinstance(value, list) and bool(value) and isinstance(value[0], list | type(None))
        return self.id_lists("token_ids_logprob", value if nested else [value] * len(self.prompts))

    def forced_ids(self) -> list[list[int] | None]:
        """`forced_output_ids` per prompt: a field of the emulator's own."""
        value = self.body.get("forced_output_ids")
        if value is None:
            return [None] * len(self.prompts)
        lists = self.id_lists("forced_output_ids", [value] if self.one else value)
        if any(entry == [] for entry in lists):
            raise rejected("forced_output_ids cannot be empty.")
        return lists

    def id_lists(self, name: str, value: Json) -> list[list[int] | None]:
        """A list of token ids, or null, per prompt."""
        if not isinstance(value, list):
            raise schema_error(name, f"Input should be a valid list; got {kind_of(value)}")
        if len(value) != len(self.prompts):
            raise rejected(f"The length of {name} should be equal to the batch size.")
        for entry in value:
            if entry is not None:
                check_token_ids(name, entry, self.limits.vocab_size)
        return value


def check_token_ids(name: str, ids: Json, vocab_size: int) -> None:
    """HttpError unless `ids` is a list of whole numbers of the vocabulary."""
    if not isinstance(ids, list):
        raise schema_error(name, f"Value error, must be list; got {kind_of(ids)}")
    for entry in ids:
        if isinstance(entry, bool):
            raise contract_error(f"invalid type: {described(entry)} in {name}, expected i64")
        if type(entry) is not int:
            raise schema_error(name, f"Value error, elements must be int or list; got {kind_of(entry)}")
    if not ids:
        if name == "input_ids":
            raise rejected("input_ids cannot be empty.")
        return
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        raise rejected(
            f"{name} holds the token id {low if low < 0 else high}, outside the vocabulary of {vocab_size} "
            "tokens."
        )


def flag(body: Mapping[str, Json], name: str) -> bool:
    """A boolean field, false when absent."""
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise contract_error(f"invalid type: {described(value)}, expected a boolean")
    return value


def kind_of(value: Json) -> str:
    """The type of a JSON value, in Python's word."""
    return "null" if value is None else type(value).__name__
