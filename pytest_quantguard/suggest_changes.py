"""What a proposal changes in a config: each bound before and after, and whether it becomes looser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pytest_quantguard.config import AccuracyConfig, Bound, GateConfig
from pytest_quantguard.suggest import Proposal, Suggestion

Direction = Literal["new", "same", "tighter", "looser"]


@dataclass(frozen=True, slots=True)
class Change:
    """One bound. key: dotted; old: None where the config has none; percent: both are shares."""

    key: str
    side: str
    old: float | None
    new: float
    percent: bool = False

    @property
    def direction(self) -> Direction:
        """Looser: what failed before can pass now."""
        if self.old is None:
            return "new"
        if self.old == self.new:
            return "same"
        return "looser" if (self.new > self.old) == (self.side == "max") else "tighter"


def changes_of(proposal: Proposal, config: GateConfig) -> list[Change]:
    """Every bound that the proposal sets, against what the config, with all it inherits, has now."""
    accuracy = [
        Change(_key(item), item.side, _old(config.accuracy, item), item.bound)
        for item in proposal.suggestions
    ]
    others = [
        Change(
            ".".join(item.path).removesuffix(f".{item.side}"), item.side, item.old, item.new, item.relative
        )
        for item in proposal.keys
    ]
    return [*accuracy, *others]


def change_lines(changes: Sequence[Change]) -> list[str]:
    """A table: key, side, before and after, what that is. Looser ones shout, since they weaken the gate."""
    olds = ["-" if change.old is None else _shown(change.old, change) for change in changes]
    widths = (
        max(len(one.key) for one in changes),
        max(map(len, olds)),
        max(len(_shown(one.new, one)) for one in changes),
    )
    return [
        f"  {one.key:{widths[0]}}  {one.side}  {old:>{widths[1]}} -> {_shown(one.new, one):{widths[2]}}  "
        f"{one.direction.upper() if one.direction == 'looser' else one.direction}"
        for old, one in zip(olds, changes, strict=True)
    ]


def _shown(value: float, change: Change) -> str:
    return f"{value * 100:.12g}%" if change.percent else f"{value:.12g}"


def _key(item: Suggestion) -> str:
    return f"accuracy.{item.metric}" + (f" in {item.phase}" if item.phase else "")


def _old(accuracy: AccuracyConfig, item: Suggestion) -> float | None:
    """The bound that the suggestion replaces: of its phase, if the config has one for all its batch sizes,
    else of all cells.
    """
    bound = accuracy.bounds.get(item.metric)
    if item.phase is not None:
        for override in accuracy.overrides:
            if override.phase == item.phase and override.batch_size is None:
                bound = override.bounds.get(item.metric, bound)
    return _of_side(bound, item.side)


def _of_side(bound: Bound | None, side: str) -> float | None:
    value: float | None = None if bound is None else getattr(bound, side)
    return value
