"""The built-in suite: seeded prompts of many kinds, short to long.

The texts are our own; they are asked as plain text, without a chat template, since log-probabilities of any
natural text show a numeric fault. Two things vary on purpose: the kind of text and the length.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from pytest_quantguard.prompts.freeform import FREEFORM
from pytest_quantguard.prompts.prompt import Prompt


def builtin_prompts(
    *, size: int, max_prompt_tokens: int, mix: Mapping[str, float] | None = None, seed: int = 0
) -> tuple[Prompt, ...]:
    """`size` prompts of about 32 to `max_prompt_tokens` tokens, the same for the same arguments."""
    names = list(mix or FREEFORM)
    prompts = []
    for index in range(size):
        name = names[index % len(names)]
        rng = random.Random(f"{seed}/{name}/{index}")
        target = 32 + int((min(max_prompt_tokens, 160) - 32) * rng.random() ** 2)
        prompts.append(Prompt(id=f"{name}-{index:03}", task=name, text=FREEFORM[name](rng, target)))
    return tuple(prompts)
