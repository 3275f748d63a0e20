"""The base of all faults: a named, parameterised defect, modelled on a public report.

A fault is a frozen dataclass; its fields are its parameters. `register` adds functions to the hook points
it needs.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

from pytest_quantguard.emulator.hooks import Hooks
from pytest_quantguard.errors import ConfigError

Severity = Literal["catastrophic", "clear", "subtle", "none"]


@dataclasses.dataclass(frozen=True)
class Fault(ABC):
    """One kind of defect; an instance is the defect with its parameters.

    name: as on the command line. summary: what is wrong, in one line. shows_in: where a gate can see it,
    in words. source: the public report. severity_by_default: how bad it is with default parameters.
    variants: parameters other than the defaults that a self-test should try, as `key=value,key=value`.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    shows_in: ClassVar[str]
    source: ClassVar[str]
    severity_by_default: ClassVar[Severity]
    variants: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def register(self, hooks: Hooks) -> None:
        """Add this fault's functions to the hook points."""

    def applies_to(self, formats: Mapping[str, str]) -> bool:
        """Whether the fault can act on such a model. formats: by module name, and of the cache by
        "kv_cache"."""
        return bool(formats)

    @property
    def severity(self) -> Severity:
        """How bad the fault is with these parameters."""
        return self.severity_by_default

    @property
    def specification(self) -> str:
        """The text that `parse_fault` turns into this fault: the name and the parameters that are not the
        defaults."""
        changed = [
            f"{field.name}={_format(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return self.name + (":" + ",".join(changed) if changed else "")


def hooks_for(faults: Iterable[Fault]) -> Hooks:
    """The hook points with all functions of `faults` registered, in order."""
    hooks = Hooks()
    for fault in faults:
        fault.register(hooks)
    return hooks


def parse_fault(specification: str, registry: Mapping[str, type[Fault]]) -> Fault:
    """Make a fault from `name` or `name:key=value,key=value`.

    Raises ConfigError naming the nearest known fault, the nearest parameter, or the type that a value
    should have.
    """
    name, _, parameters = specification.strip().partition(":")
    kind = registry.get(name)
    if kind is None:
        raise ConfigError(
            f"unknown fault {name!r}{_nearest(name, registry)}; known faults: {', '.join(sorted(registry))}"
        )
    hints = typing.get_type_hints(kind)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for part in filter(None, (text.strip() for text in parameters.split(","))):
        key, equals, text = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise ConfigError(f"fault {name}: expected key=value, found {part!r} in {specification!r}")
        if key not in fields:
            known = ", ".join(fields) if fields else "none"
            raise ConfigError(
                f"fault {name}: unknown parameter {key!r}{_nearest(key, fields)}; its parameters: {known}"
            )
        if key in values:
            raise ConfigError(f"fault {name}: parameter {key!r} is given twice in {specification!r}")
        values[key] = _convert(text, fields[key], f"fault {name}: parameter {key}")
    try:
        return kind(**values)
    except ValueError as error:
        raise ConfigError(f"fault {name}: {error}") from error


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _format(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _convert(text: str, kind: Any, where: str) -> Any:
    """Turn a parameter's text into the type of its dataclass field."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(kind) if member is not type(None)]
        return None if text.lower() == "none" else _convert(text, members[0], where)
    if typing.get_origin(kind) is Literal:
        allowed = typing.get_args(kind)
        if text not in allowed:
            raise ConfigError(f"{where}: expected one of {', '.join(allowed)}, found {text!r}")
        return text
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"{where}: expected true or false, found {text!r}")
        return text.lower() == "true"
    if kind is str:
        return text
    try:
        return kind(text)
    except ValueError as error:
        noun = {"int": "a whole number", "float": "a number"}[kind.__name__]
        raise ConfigError(f"{where}: expected {noun}, found {text!r}") from error
