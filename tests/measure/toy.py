"""A language model of a few lines, and a client that serves it in this process.

The next-token distribution depends on every token of the prefix and on nothing else, so that a row which was
conditioned on a wrong prefix cannot equal the right one by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pytest_quantguard.baseline.recording import PromptRecord
from pytest_quantguard.logprobs.arrays import TopLogprobs
from pytest_quantguard.serving.answers import Answer, GenerateRequest

VOCAB = 64
EOS = 0


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


@dataclass
class ToyModel:
    """Full log-probabilities after a prefix.

    disagree(n) says whether the model's favourite after a prefix of n tokens is another than that of the
    plain model.
    """

    seed: int = 0
    disagree: Callable[[int], bool] = lambda _length: False
    end_after: int | None = None

    def logits(self, prefix: Sequence[int]) -> np.ndarray:
        generator = np.random.default_rng([self.seed, len(prefix), *prefix])
        logits = generator.normal(0.0, 2.0, VOCAB)
        logits[EOS] = 50.0 if self.end_after is not None and len(prefix) >= self.end_after else -50.0
        if self.disagree(len(prefix)):
            best = int(logits.argmax())
            logits[best] = logits.min() - 1.0
        return logits

    def logprobs(self, prefix: Sequence[int]) -> np.ndarray:
        return log_softmax(self.logits(prefix))

    def greedy(self, prefix: Sequence[int]) -> int:
        return int(self.logits(prefix).argmax())

    def continuation(self, prefix: Sequence[int], length: int) -> list[int]:
        tokens = list(prefix)
        for _ in range(length):
            tokens.append(self.greedy(tokens))
        return tokens[len(prefix) :]

    def row(self, prefix: Sequence[int], width: int) -> tuple[np.ndarray, np.ndarray]:
        logprobs = self.logprobs(prefix)
        order = np.argsort(-logprobs, kind="stable")[:width]
        return order.astype(np.int32), logprobs[order].astype(np.float32)


@dataclass(frozen=True)
class Asked:
    """What a perturbation may look at: how a row came about."""

    phase: str
    batch_size: int
    slot: int
    cached: int
    call: int
    position: int


@dataclass
class ToyClient:
    """Serves a `ToyModel`; the knobs make it behave like servers that are not quite as they should be."""

    model: ToyModel = field(default_factory=ToyModel)
    radix_cache: bool = False
    flush_works: bool = True
    most_logprobs: int | None = None
    drop_rows: int = 0
    shift_chosen: bool = False
    perturb: Callable[[Asked, np.ndarray], np.ndarray] | None = None
    vocab_size: int = VOCAB
    requests: list[list[GenerateRequest]] = field(default_factory=list)
    flushes: int = 0
    calls_before: int = 0
    cache: set[tuple[int, ...]] = field(default_factory=set)
    texts: dict[str, list[int]] = field(default_factory=dict)

    def tokenize(self, text: str) -> list[int]:
        return (
            self.texts[text]
            if text in self.texts
            else [1 + ord(character) % (VOCAB - 1) for character in text]
        )

    def flush_cache(self) -> None:
        self.flushes += 1
        if self.flush_works:
            self.cache.clear()

    def generate(self, batch: Sequence[GenerateRequest], *, top_logprobs: int = 0) -> list[Answer]:
        self.requests.append(list(batch))
        cached = [self._cached(request) for request in batch]
        answers = [
            self._answer(request, slot, len(batch), cached[slot], top_logprobs)
            for slot, request in enumerate(batch)
        ]
        if self.radix_cache:
            for request, answer in zip(batch, answers, strict=True):
                tokens = (*request.input_ids, *answer.output_ids)
                self.cache.update(tokens[:end] for end in range(1, len(tokens) + 1))
        return answers

    def _cached(self, request: GenerateRequest) -> int:
        limit = len(request.input_ids) - 1 if request.logprob_start_len is None else request.logprob_start_len
        return max((end for end in range(1, limit + 1) if request.input_ids[:end] in self.cache), default=0)

    def _answer(self, request: GenerateRequest, slot: int, size: int, cached: int, width: int) -> Answer:
        tokens = list(request.input_ids)
        call = self.calls_before + len(self.requests)
        prompt = None
        if request.logprob_start_len is not None:
            places = range(request.logprob_start_len + 1, len(tokens) - self.drop_rows)
            made = [Asked("prefill", size, slot, cached, call, place) for place in places]
            prompt = self._rows(
                [tokens[:place] for place in places], [tokens[p] for p in places], made, width
            )
        prefixes, emitted, made, reason = [], [], [], "length"
        for step in range(request.max_new_tokens):
            prefixes.append(list(tokens))
            phase = "prefill" if step == 0 else "decode"
            made.append(Asked(phase, size, slot, cached, call, len(tokens)))
            if request.forced_ids is not None:
                token = request.forced_ids[step]
            else:
                token = int(self._logprobs(tokens, made[-1]).argmax())
            emitted.append(token)
            tokens.append(token)
            if token == EOS and not request.ignore_eos:
                reason = "stop"
                break
        return Answer(
            output_ids=tuple(emitted),
            text="",
            finish_reason=reason,
            prompt_tokens=len(request.input_ids),
            completion_tokens=len(emitted),
            cached_tokens=cached,
            prompt=prompt,
            output=self._rows(prefixes, emitted, made, width) if emitted else None,
        )

    def _logprobs(self, prefix: Sequence[int], asked: Asked) -> np.ndarray:
        logits = self.model.logits(prefix)
        return log_softmax(logits if self.perturb is None else self.perturb(asked, logits))

    def _rows(
        self, prefixes: list[list[int]], chosen: list[int], made: list[Asked], width: int
    ) -> TopLogprobs:
        width = min(width, self.most_logprobs or width)
        if self.shift_chosen:
            chosen = [1 + token % (VOCAB - 1) for token in chosen]
        full = [self._logprobs(prefix, asked) for prefix, asked in zip(prefixes, made, strict=True)]
        order = [np.argsort(-row, kind="stable")[:width] for row in full]
        count = len(full)
        return TopLogprobs(
            token_ids=np.array(order, dtype=np.int32).reshape(count, width),
            logprobs=np.array(
                [row[ids] for row, ids in zip(full, order, strict=True)], dtype=np.float32
            ).reshape(count, width),
            chosen_ids=np.array(chosen, dtype=np.int32),
            vocab_size=self.vocab_size,
            chosen_logprobs=np.array(
                [row[token] for row, token in zip(full, chosen, strict=True)], dtype=np.float32
            ),
        )


def toy_prompts(
    count: int, span: int, *, model: ToyModel | None = None, shortest: int = 3
) -> tuple[PromptRecord, ...]:
    """Prompts of different lengths with the model's greedy continuation."""
    model = model or ToyModel()
    records = []
    for index in range(count):
        generator = np.random.default_rng([7, index])
        prompt = generator.integers(1, VOCAB, shortest + index % 5).tolist()
        tokens = [*prompt, *model.continuation(prompt, span)]
        records.append(
            PromptRecord(
                f"toy-{index}",
                f"task-{index % 2}",
                np.array(tokens, dtype=np.int32),
                len(prompt),
                len(prompt),
            )
        )
    return tuple(records)
