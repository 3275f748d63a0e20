"""What the suite of a trial is made of, for its report."""

from __future__ import annotations

from importlib.util import find_spec

from pytest_quantguard.gate.trial import Trial
from pytest_quantguard.prompts.analysis import Composition, analyze

MOST_CHARACTERS = 4_000_000
"""Of a suite that is analyzed with every run: a few seconds on one core."""


def describe_prompts(trial: Trial) -> Composition | None:
    """The composition of the suite, lengths as the reference's tokenizer counted them; None where the
    baseline was not read, and with a note where the suite is too large to be analyzed in passing.
    """
    baseline = trial.known_baseline()
    if baseline is None or not trial.suite().prompts:
        return None
    prompts = trial.suite().prompts
    size = sum(len(prompt.text or "") for prompt in prompts)
    if size > MOST_CHARACTERS:
        note = (
            f"the prompts have {size} characters, too many to be analyzed with every run: quantguard analyze "
            f"{trial.config.suite.prompts} --html FILE"
        )
        trial.notes += [note] if note not in trial.notes else []
        return None

    def analyzed() -> Composition:
        return analyze(
            prompts,
            name=str(trial.config.suite.prompts),
            token_ids=[prompt.token_ids[: prompt.prompt_tokens].tolist() for prompt in baseline.prompts],
            look_for_near_duplicates=find_spec("datasketch") is not None,
        ).composition

    return trial.once("prompt set", analyzed)
