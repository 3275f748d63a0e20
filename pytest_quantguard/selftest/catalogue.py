"""Which faults a self-test tries, and why others are not tried.

Needs the `[emulator]` extra.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from pytest_quantguard.emulator.faults import FAULTS, Fault, Severity, parse_fault
from pytest_quantguard.errors import ConfigError

NO_CHECK = {
    "speed": "it shows in speed, which a self-test does not time",
    "generation": "it shows in generated text, which a self-test does not ask for",
}
"""By `shows_in`: faults that no check of a self-test can see."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A fault to try.

    skipped: why it is not tried; None where it is. note: what is said with the result.
    """

    fault: Fault
    skipped: str | None
    note: str | None = None


def choose_faults(
    names: Sequence[str], formats: Mapping[str, str], longest: int, *, variants: bool = False
) -> tuple[Candidate, ...]:
    """The faults to try on a model with these formats (by module, and of the cache by "kv_cache").

    names: specifications; none means the whole catalogue with default parameters, and with `variants` also
    with the parameters that each fault suggests. longest: tokens of the longest text; of the catalogue,
    faults that set in at a later position are tried at one within it. Raises ConfigError for an unknown name
    or parameter.
    """
    specifications = list(names)
    if not specifications:
        for kind in FAULTS.values():
            specifications.append(kind.name)
            specifications += [f"{kind.name}:{variant}" for variant in kind.variants if variants]
    faults = dict.fromkeys(parse_fault(specification, FAULTS) for specification in specifications)
    if not names:
        return tuple(_fitted(fault, formats, longest) for fault in faults)
    return tuple(Candidate(fault, _why_not(fault, formats)) for fault in faults)


def split_names(text: str) -> list[str]:
    """The faults of `name,name:key=value,key=value,name`: a part with "=" before any ":" is a parameter."""
    names: list[str] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        if "=" in part.partition(":")[0] and names:
            names[-1] += f",{part}"
        else:
            names.append(part)
    return names


def must_be_caught(fault: Fault, marked: Sequence[str]) -> bool:
    """Whether a fault is marked: by its specification, its name or its severity."""
    return any(
        mark in (fault.name, fault.severity) or (":" in mark and parse_fault(mark, FAULTS) == fault)
        for mark in marked
    )


def check_marks(marked: Sequence[str]) -> None:
    """Raise ConfigError for a mark that is neither a severity nor a fault."""
    severities: tuple[Severity, ...] = get_args(Severity)
    for mark in marked:
        if mark not in severities:
            try:
                parse_fault(mark, FAULTS)
            except ConfigError as error:
                raise ConfigError(
                    f"selftest.must_catch: {error}. Allowed are also the severities {', '.join(severities)}."
                ) from error


def _fitted(fault: Fault, formats: Mapping[str, str], longest: int) -> Candidate:
    """A fault of the catalogue, moved to half of the longest text if it would set in after its end."""
    skipped = _why_not(fault, formats)
    position = getattr(fault, "position", None)
    if position is None or position < longest:
        return Candidate(fault, skipped)
    moved = parse_fault(f"{fault.name}:position={longest // 2}", FAULTS)
    note = (
        f"by default it sets in at position {position}, after the end of every text that is asked "
        f"({longest} tokens): as such it could not show; tried at {longest // 2}"
    )
    return Candidate(moved, skipped, note)


def _why_not(fault: Fault, formats: Mapping[str, str]) -> str | None:
    if fault.shows_in in NO_CHECK:
        return NO_CHECK[fault.shows_in]
    if not fault.applies_to(formats):
        kinds = ", ".join(sorted(set(formats.values())))
        return f"nothing in this model has what it damages (formats: {kinds})"
    return None
