"""Prompts that say the same: exactly, nearly, or at their beginning.

Near duplicates are found by MinHash with the datasketch library (`pip install 'pytest-quantguard[analysis]'`)
and confirmed by the true similarity, so that none is reported by chance.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from pytest_quantguard.errors import QuantguardError
from pytest_quantguard.prompts.measures import tokenize_words

if TYPE_CHECKING:
    from datasketch import MinHash, MinHashLSH

PERMUTATIONS = 64
SHINGLE = 5
"""Words in a row; two texts are as similar as the share of such runs that both have (Jaccard)."""
NEAR = 0.8
INSTALL = "pip install 'pytest-quantguard[analysis]'"


def exact_key(text: str) -> str:
    """The same for texts that differ in white space and capitals only."""
    return hashlib.sha256(" ".join(text.split()).casefold().encode("utf-8", "surrogatepass")).hexdigest()


def shingles(text: str) -> frozenset[int]:
    """Hashes of all runs of SHINGLE words; of the whole text if it is shorter."""
    words = [word.casefold() for word in tokenize_words(text)]
    starts = range(max(1, len(words) - SHINGLE + 1))
    return frozenset(
        zlib.crc32(" ".join(words[start : start + SHINGLE]).encode("utf-8", "surrogatepass"))
        for start in starts
    )


def similarity(one: frozenset[int], other: frozenset[int]) -> float:
    """Jaccard similarity, 0 to 1."""
    return len(one & other) / len(one | other)


class NearDuplicates:
    """An index of texts that answers which of them is nearly a given one."""

    def __init__(self, threshold: float = NEAR) -> None:
        """threshold: similarity from which two texts count as the same. Raises QuantguardError without
        datasketch.
        """
        self.threshold = threshold
        # Arrays, since a set of small numbers takes twenty times their size.
        self._shingles: list[array[int]] = []
        self._index, self._empty = _make_index(threshold)

    def add(self, text: str) -> int | None:
        """Add a text; its number is the count of those before it.

        Returns the number of the earlier text that it is most like, if one is like enough.
        """
        own = shingles(text)
        sketch = self._sketch(own)
        found = self._best(own, sketch)
        self._index.insert(len(self._shingles), sketch, check_duplication=False)
        self._shingles.append(array("I", own))
        return found

    def find(self, text: str) -> int | None:
        """The number of the added text that is most like `text`, if one is like enough."""
        own = shingles(text)
        return self._best(own, self._sketch(own))

    def _best(self, own: frozenset[int], sketch: MinHash) -> int | None:
        near = [
            (similarity(own, frozenset(self._shingles[number])), -number)
            for number in self._index.query(sketch)
        ]
        best, negative = max(near, default=(0.0, 0))
        return -negative if best >= self.threshold else None

    def _sketch(self, own: frozenset[int]) -> MinHash:
        sketch = self._empty.copy()
        sketch.update_batch(list(own))
        return sketch


def near_duplicate_groups(texts: Sequence[str], threshold: float = NEAR) -> list[list[int]]:
    """Groups of indices of texts that are nearly an earlier one of the group, or exactly."""
    index = NearDuplicates(threshold)
    groups: dict[int, list[int]] = defaultdict(list)
    first_of: list[int] = []
    for number, text in enumerate(texts):
        found = index.add(text)
        first_of.append(number if found is None else first_of[found])
        groups[first_of[-1]].append(number)
    return [group for group in groups.values() if len(group) > 1]


def exact_duplicate_groups(texts: Iterable[str]) -> list[list[int]]:
    """Groups of indices of texts that are the same but for white space and capitals."""
    groups: dict[str, list[int]] = defaultdict(list)
    for number, text in enumerate(texts):
        groups[exact_key(text)].append(number)
    return [group for group in groups.values() if len(group) > 1]


def shared_prefix_share(texts: Sequence[str]) -> float:
    """Share of all characters that a prefix cache would not compute again, had it room for every text."""
    total = sum(map(len, texts))
    shared = sum(_common_length(one, other) for one, other in pairwise(sorted(texts)))
    return shared / total if total else 0.0


def _common_length(one: str, other: str) -> int:
    """How many characters two texts share at their beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


def _make_index(threshold: float) -> tuple[MinHashLSH, MinHash]:
    try:
        from datasketch import MinHash, MinHashLSH
    except ImportError as error:
        raise QuantguardError(f"Finding near duplicates needs the package datasketch: {INSTALL}") from error
    # The shingles are hashes already.
    empty = MinHash(num_perm=PERMUTATIONS, hashfunc=_identity)
    return MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS), empty


def _identity(value: int) -> int:
    return value
