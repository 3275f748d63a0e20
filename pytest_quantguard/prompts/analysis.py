"""What is in a prompt set: tasks, lengths, languages, low-meaning text, duplicates, shared beginnings,
vocabulary.

Whatever is measured with a prompt set is only as good as its mix. How text is measured is in `measures`, how
duplicates are found in `duplicates`, how an analysis is written in `analysis_text`.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_quantguard.prompts.duplicates import (
    exact_duplicate_groups,
    near_duplicate_groups,
    shared_prefix_share,
)
from pytest_quantguard.prompts.lengths import estimate_tokens
from pytest_quantguard.prompts.measures import LOW_MEANING, TextMeasures, measure_text, tokenize_words
from pytest_quantguard.prompts.prompt import Prompt

Encode = Callable[[str], Sequence[int]]
"""Text to token ids; `ChatTokenizer.encode` or a server's tokenizer."""

VOCABULARY_BUCKETS = 4096
ANALYSIS_VERSION = 1


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens per prompt."""

    least: int
    median: float
    mean: float
    p90: float
    most: int
    total: int


@dataclass(frozen=True, slots=True)
class GroupAnalysis:
    """The prompts of one task, or all.

    share: of all prompts. low_meaning, opaque, word_list, repetition: mean share of the text, see
    `TextMeasures`. flagged: share of prompts of which LOW_MEANING or more has little meaning. compression,
    class_entropy: means.
    """

    prompts: int
    share: float
    lengths: Lengths
    low_meaning: float
    opaque: float
    word_list: float
    repetition: float
    flagged: float
    compression: float
    class_entropy: float


@dataclass(frozen=True, slots=True)
class Composition:
    """What a prompt set is made of. Groups of duplicates hold prompt ids, the one to keep first.

    tokens_are: "counted" by a tokenizer, or "estimated". languages: share of prompts. length_histogram: share
    of prompts whose length rounds down to that power of two. near_duplicates: None where they were not looked
    for. shared_prefix: share of all text that another prompt begins with too. distinct_tokens: of the
    tokenizer if there is one, else words.
    """

    name: str
    total: GroupAnalysis
    tasks: Mapping[str, GroupAnalysis]
    tokens_are: str
    languages: Mapping[str, float]
    length_histogram: Mapping[int, float]
    low_meaning_ids: tuple[str, ...]
    exact_duplicates: tuple[tuple[str, ...], ...]
    near_duplicates: tuple[tuple[str, ...], ...] | None
    shared_prefix: float
    distinct_tokens: int


@dataclass(frozen=True, slots=True)
class Analysis(Composition):
    """What `analyze` found: the composition, and by which words it is told from another set's.

    vocabulary: share of all words in each of VOCABULARY_BUCKETS hash buckets.
    """

    vocabulary: npt.NDArray[np.float64]

    @property
    def composition(self) -> Composition:
        """Without what only a comparison needs."""
        return Composition(**{field.name: getattr(self, field.name) for field in fields(Composition)})

    def to_json(self) -> dict[str, Any]:
        """A versioned object of plain values, without the vocabulary's buckets."""
        found = asdict(self.composition)
        found["length_histogram"] = {str(length): share for length, share in self.length_histogram.items()}
        return {"analysis_version": ANALYSIS_VERSION, **found}


@dataclass(frozen=True, slots=True)
class MixDistance:
    """How differently two sets are composed: each the total variation distance, 0 the same, 1 nothing in
    common.

    low_meaning: the difference of the mean shares. vocabulary: of the words used; between any two small sets
    it is far from 0.
    """

    tasks: float
    languages: float
    lengths: float
    low_meaning: float
    vocabulary: float

    def to_json(self) -> dict[str, float]:
        """Plain values by name."""
        return asdict(self)


def analyze(
    prompts: Sequence[Prompt],
    *,
    name: str = "prompts",
    encode: Encode | None = None,
    token_ids: Sequence[Sequence[int]] | None = None,
    look_for_near_duplicates: bool = True,
) -> Analysis:
    """Analyze prompts; those given as token ids alone count in lengths only.

    encode, or token_ids of each prompt where they are known, makes lengths exact; without they are estimates.
    Raises QuantguardError if near duplicates are looked for without the `analysis` extra, ValueError for no
    prompts.
    """
    if not prompts:
        raise ValueError("there are no prompts to analyze")
    texts = [prompt.text or "" for prompt in prompts]
    measures = [measure_text(text) for text in texts]
    lengths, distinct = _lengths(prompts, encode, token_ids)
    counted = encode is not None or token_ids is not None
    by_task: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_task.setdefault(prompt.task, []).append(index)
    with_text = [index for index, text in enumerate(texts) if text]
    given = [texts[index] for index in with_text]

    def ids(groups: list[list[int]]) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(prompts[with_text[number]].id for number in group) for group in groups)

    words = Counter(word for text in given for word in tokenize_words(text.casefold()))
    everything = list(range(len(prompts)))
    return Analysis(
        name=name,
        total=_group(everything, measures, lengths, len(prompts)),
        tasks={task: _group(indices, measures, lengths, len(prompts)) for task, indices in by_task.items()},
        tokens_are="counted" if counted else "estimated",
        languages=_shares(measure.language for measure in measures),
        length_histogram=_shares(1 << max(0, int(length).bit_length() - 1) for length in sorted(lengths)),
        low_meaning_ids=tuple(
            prompt.id for prompt, measure in zip(prompts, measures, strict=True) if _is_flagged(measure)
        ),
        exact_duplicates=ids(exact_duplicate_groups(given)),
        near_duplicates=ids(near_duplicate_groups(given)) if look_for_near_duplicates else None,
        shared_prefix=shared_prefix_share(given),
        distinct_tokens=distinct if counted else len(words),
        vocabulary=_vocabulary(words),
    )


def distance(one: Analysis, other: Analysis) -> MixDistance:
    """How far apart two mixes are."""
    return MixDistance(
        tasks=_total_variation(
            {task: group.share for task, group in one.tasks.items()},
            {task: group.share for task, group in other.tasks.items()},
        ),
        languages=_total_variation(one.languages, other.languages),
        lengths=_total_variation(one.length_histogram, other.length_histogram),
        low_meaning=abs(one.total.low_meaning - other.total.low_meaning),
        vocabulary=float(np.abs(one.vocabulary - other.vocabulary).sum() / 2),
    )


def _lengths(
    prompts: Sequence[Prompt], encode: Encode | None, known: Sequence[Sequence[int]] | None
) -> tuple[npt.NDArray[np.int64], int]:
    """(tokens of each prompt, number of distinct token ids)."""
    lengths, distinct = [], set[int]()
    for number, prompt in enumerate(prompts):
        token_ids = known[number] if known is not None else prompt.token_ids
        if token_ids is None and encode is not None:
            token_ids = encode(prompt.text or "")
        lengths.append(estimate_tokens(prompt.text or "") if token_ids is None else len(token_ids))
        distinct.update(token_ids or ())
    return np.array(lengths, dtype=np.int64), len(distinct)


def _group(
    indices: Sequence[int], measures: Sequence[TextMeasures], lengths: npt.NDArray[np.int64], total: int
) -> GroupAnalysis:
    own = [measures[index] for index in indices]
    tokens = lengths[list(indices)]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    return GroupAnalysis(
        prompts=len(own),
        share=len(own) / total,
        lengths=Lengths(
            least=int(tokens.min()),
            median=float(np.median(tokens)),
            mean=float(tokens.mean()),
            p90=float(np.quantile(tokens, 0.9)),
            most=int(tokens.max()),
            total=int(tokens.sum()),
        ),
        low_meaning=mean([measure.low_meaning for measure in own]),
        opaque=mean([measure.opaque for measure in own]),
        word_list=mean([measure.word_list for measure in own]),
        repetition=mean([measure.repetition for measure in own]),
        flagged=mean([float(_is_flagged(measure)) for measure in own]),
        compression=mean([measure.compression for measure in own]),
        class_entropy=mean([measure.class_entropy for measure in own]),
    )


def _is_flagged(measure: TextMeasures) -> bool:
    return measure.low_meaning >= LOW_MEANING


def _shares(values: Any) -> dict[Any, float]:
    counts = Counter(values)
    total = sum(counts.values())
    return {value: count / total for value, count in counts.items()}


def _vocabulary(words: Mapping[str, int]) -> npt.NDArray[np.float64]:
    buckets = np.zeros(VOCABULARY_BUCKETS, dtype=np.float64)
    for word, count in words.items():
        buckets[zlib.crc32(word.encode("utf-8", "surrogatepass")) % VOCABULARY_BUCKETS] += count
    shares: npt.NDArray[np.float64] = buckets / max(buckets.sum(), 1.0)
    return shares


def _total_variation(one: Mapping[Any, float], other: Mapping[Any, float]) -> float:
    # A set of texts has another order in every process, and a plain sum another last digit.
    return math.fsum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in one.keys() | other.keys()) / 2
