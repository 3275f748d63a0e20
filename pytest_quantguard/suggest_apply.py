"""Puts proposed bounds into the text of a config: only the numbers change, comments and order stay."""

from __future__ import annotations

import re
from dataclasses import dataclass

import yaml

from pytest_quantguard.errors import ConfigError
from pytest_quantguard.suggest import STARTING_POINTS, KeyBound, Proposal, Suggestion, entry_of, reason_of

OWN_REMARK = re.compile(r"# (worst|measured) \S.*")
"""The reason of an earlier proposal."""


@dataclass(frozen=True, slots=True)
class _Edit:
    """Replace text[start:end]."""

    start: int
    end: int
    text: str


def apply_to(text: str, proposal: Proposal) -> str:
    """`text` of a config with the proposed bounds in its own sections.

    Bounds that the section has get another number, others are added at its beginning; what the config
    inherits is overridden here. Raises ConfigError for a section written on one line, which cannot be added
    to.
    """
    for key in proposal.keys:
        text = _with_key(text, key)
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    section = _value(root, "accuracy")
    if section is None:
        return f"{text.rstrip()}\n{_whole_section(proposal)}"
    if not isinstance(section, yaml.MappingNode) or section.flow_style:
        raise ConfigError(
            "`accuracy` is written on one line in { }, so nothing can be put into it. Write it over several "
            "lines, "
            "or use --write FILE."
        )
    indent = section.value[0][0].start_mark.column
    edits, added = [], []
    for item in proposal.suggestions:
        number = _number_of(section, item)
        if number is not None:
            edits.append(_Edit(number.start_mark.index, number.end_mark.index, f"{item.bound:.12g}"))
            edits += _remark(text, number.end_mark.index, reason_of(item))
        else:
            added.append(item)
    first = section.value[0][0].start_mark.index
    edits.append(_Edit(first, first, _new_lines(section, added, indent)))
    return _edited(text, edits).replace(STARTING_POINTS, "# by quantguard suggest")


def _value(node: yaml.Node | None, key: str) -> yaml.Node | None:
    """What stands behind a key of a mapping."""
    if not isinstance(node, yaml.MappingNode):
        return None
    return next((value for name, value in node.value if name.value == key), None)


def _number_of(section: yaml.MappingNode, item: Suggestion) -> yaml.ScalarNode | None:
    """Where the bound of a suggestion is written, if it is."""
    holder: yaml.Node | None = section
    if item.phase is not None:
        holder = next((entry for entry in _overrides(section) if _is_of_phase(entry, item.phase)), None)
    number = _value(_value(holder, item.metric), item.side)
    return number if isinstance(number, yaml.ScalarNode) else None


def _overrides(section: yaml.MappingNode) -> list[yaml.Node]:
    overrides = _value(section, "overrides")
    return list(overrides.value) if isinstance(overrides, yaml.SequenceNode) else []


def _is_of_phase(entry: yaml.Node, phase: str) -> bool:
    """Whether an override is for all batch sizes of this phase."""
    named = _value(entry, "phase")
    return isinstance(named, yaml.ScalarNode) and named.value == phase and _value(entry, "batch_size") is None


def _remark(text: str, index: int, reason: str) -> list[_Edit]:
    """The reason at the end of the line, in place of an earlier one; what somebody wrote there stays."""
    end = text.find("\n", index)
    end = len(text) if end < 0 else end
    ours = OWN_REMARK.search(text, index, end)
    if ours is not None:
        return [_Edit(ours.start(), end, f"# {reason}")]
    return [] if "#" in text[index:end] else [_Edit(end, end, f"   # {reason}")]


def _with_key(text: str, item: KeyBound) -> str:
    """`text` with one bound of another section than accuracy: another number where the key stands, else a
    line at the beginning of the nearest section above it.
    """
    node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    depth = 0
    while depth < len(item.path) and (inner := _value(node, item.path[depth])) is not None:
        node, depth = inner, depth + 1
    if depth == len(item.path) and isinstance(node, yaml.ScalarNode):
        end = node.end_mark.index
        return _edited(
            text, [_Edit(node.start_mark.index, end, item.shown), *_remark(text, end, item.reason)]
        )
    *parents, last = item.path[depth:]
    entry = f"{last}: {item.shown}"
    for parent in reversed(parents):
        entry = f"{parent}: {{{entry}}}"
    if depth == 0:
        section, _, rest = entry.partition(": ")
        return f"{text.rstrip()}\n{section}:   # by quantguard suggest\n  {rest[1:-1]}   # {item.reason}\n"
    if not isinstance(node, yaml.MappingNode) or not node.value:
        raise ConfigError(
            f"`{'.'.join(item.path[:depth])}` has nothing in it, so where {'.'.join(item.path)} belongs is "
            "yours to say. Use --write FILE, and copy from it."
        )
    first = node.value[0][0].start_mark
    line = f"{entry}, " if node.flow_style else f"{entry}   # {item.reason}\n{' ' * first.column}"
    return _edited(text, [_Edit(first.index, first.index, line)])


def _new_lines(section: yaml.MappingNode, added: list[Suggestion], indent: int) -> str:
    """Lines for the beginning of the section, whose first key stands at column `indent`."""
    lines = [f"{entry_of(item)}   # {reason_of(item)}" for item in added if item.phase is None]
    special = [item for item in added if item.phase is not None]
    if special and _overrides(section):
        names = ", ".join(f"{item.metric} in {item.phase}" for item in special)
        raise ConfigError(
            f"`accuracy.overrides` has entries of its own, and where bounds for {names} belong among them "
            "is yours to "
            "say. Use --write FILE, and copy from it."
        )
    if special:
        lines.append("overrides:")
        lines += [f"  - {{phase: {item.phase}, {entry_of(item)}}}   # {reason_of(item)}" for item in special]
    return "".join(f"{line}\n{' ' * indent}" for line in lines)


def _whole_section(proposal: Proposal) -> str:
    empty = yaml.MappingNode("tag:yaml.org,2002:map", [])
    lines = _new_lines(empty, list(proposal.suggestions), 2).rstrip()
    return f"accuracy:   # by quantguard suggest\n  {lines}\n"


def _edited(text: str, edits: list[_Edit]) -> str:
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text
