"""Lengths of texts in tokens, without a tokenizer."""

from __future__ import annotations

LATIN_CHARACTERS_PER_TOKEN = 4.0
OTHER_CHARACTERS_PER_TOKEN = 1.0


def estimate_tokens(text: str) -> int:
    """About how many tokens a usual byte-pair vocabulary needs: four letters each, or one other character."""
    latin = sum(character < "\u0250" for character in text)
    return round(latin / LATIN_CHARACTERS_PER_TOKEN + (len(text) - latin) / OTHER_CHARACTERS_PER_TOKEN)
