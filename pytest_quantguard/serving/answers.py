"""What is asked of a server and what comes back, whatever the server's dialect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pytest_quantguard.logprobs.arrays import TopLogprobs

ForcedDecode = Literal["emulator_field", "custom_logit_processor"]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt of a batch. Always token ids, always greedy.

    logprob_start_len: None asks nothing about the prompt; s >= 0 returns rows for tokens s+1 .. n-1.
    forced_ids: tokens that decode must emit (teacher forcing); its length is then the number of decode steps.
    rid: a name by which `Client.abort` can end the request; its answer then has the finish reason "abort".
    """

    input_ids: tuple[int, ...]
    max_new_tokens: int = 0
    logprob_start_len: int | None = None
    ignore_eos: bool = True
    forced_ids: tuple[int, ...] | None = None
    rid: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt's answer, checked against its request.

    prompt: rows for prompt tokens logprob_start_len+1 .. n-1 (chosen_ids are these tokens), or None.
    output: a row per generated token (chosen_ids are the emitted or forced tokens), or None.
    """

    output_ids: tuple[int, ...]
    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    prompt: TopLogprobs | None
    output: TopLogprobs | None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One conversation for /v1/chat/completions; greedy.

    template_variables: further variables of the server's chat template.
    """

    messages: tuple[Mapping[str, str], ...]
    max_new_tokens: int
    rid: str
    template_variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The answer to a `ChatRequest`; text is "" where the server sent none."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a server says of itself; None where it does not say."""

    kind: Literal["sglang", "emulator", "unknown"]
    version: str | None
    model_path: str | None
    dtype: str | None
    quantization: str | None
    kv_cache_dtype: str | None
    vocab_size: int | None
    context_length: int | None
    flat_logprobs: bool
    forced_decode: ForcedDecode | None
    deterministic: bool | None
    radix_cache: bool | None
    chunked_prefill_size: int | None
    device: str | None
    server_args: Mapping[str, Any] = field(default_factory=dict)
