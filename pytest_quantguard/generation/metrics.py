"""What is judged of generated answers: the names that configs and results use. Looks at no answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

EVERYTHING = "all"
"""Stands for all tasks together, where figures are kept by task."""


@dataclass(frozen=True, slots=True)
class GenerationMetric:
    """A metric of a set of answers; better: which way is good."""

    name: str
    better: Literal["lower", "higher"]
    unit: str
    description: str


_METRICS = (
    GenerationMetric("score", "higher", "share", "Mean score of the candidate's answers."),
    GenerationMetric(
        "relative_score", "higher", "ratio", "Mean score as a share of the reference's on the same prompts."
    ),
    GenerationMetric(
        "loss_p",
        "higher",
        "probability",
        "Exact McNemar (sign) test: how likely chance alone would lose so many more answers than it wins; 1 "
        "where no more were lost than won.",
    ),
    GenerationMetric(
        "runaways", "lower", "share", "Answers cut off by length or time where the reference ended by itself."
    ),
    GenerationMetric(
        "empty_answers", "lower", "share", "Answers without text where the reference wrote some."
    ),
    GenerationMetric(
        "loops", "lower", "share", "Answers that repeat themselves where the reference does not."
    ),
    GenerationMetric(
        "echoes", "lower", "share", "Answers that repeat the question where the reference does not."
    ),
    GenerationMetric(
        "length_ratio", "lower", "ratio", "Tokens of all answers, as a ratio to the reference's."
    ),
    GenerationMetric(
        "text_agreement", "higher", "share", "Answers that are the reference's, letter by letter."
    ),
)

GENERATION_METRICS: Mapping[str, GenerationMetric] = MappingProxyType(
    {metric.name: metric for metric in _METRICS}
)
