"""Builds HTML and SVG in which text cannot become markup: what is not `Html` is escaped when it goes in."""

from __future__ import annotations

import html
from collections.abc import Iterable

from pytest_quantguard.report.visible import visible

LONGEST_TEXT = 4000
LONGEST_BLOCK = 20_000
VOID = frozenset({"meta", "br", "hr", "link"})


class Html(str):
    """Markup. Only this module, and constants in code, may make one."""

    __slots__ = ()


Child = str | int | float | None | Iterable["Child"]
"""Text is escaped, `Html` is taken as it is, None is nothing, iterables are joined."""


def tag(name: str, /, *children: Child, **attributes: str | int | float | bool | None) -> Html:
    """An element. `class_` and `for_` lose their underscore, other underscores become hyphens; None and False
    leave an attribute out, True gives it without a value.
    """
    opening = name + "".join(_attribute(key, value) for key, value in attributes.items())
    if name in VOID:
        return Html(f"<{opening}>")
    return Html(f"<{opening}>{join(children)}</{name}>")


def join(children: Iterable[Child]) -> Html:
    """Children one after the other."""
    return Html("".join(_markup(child) for child in children))


def text(value: str, *, longest: int = LONGEST_TEXT) -> Html:
    """Text on one line, with everything invisible made visible and everything special escaped."""
    return Html(html.escape(visible(value, longest=longest)))


def foreign(value: str, *, longest: int = LONGEST_TEXT) -> Html:
    """The same for text of prompts and models: isolated, so that its direction of writing ends with it."""
    return tag("bdi", text(value, longest=longest))


def block(value: str) -> Html:
    """Text of several lines, for `pre`; of a very long one the beginning and the end."""
    if len(value) > LONGEST_BLOCK:
        half = LONGEST_BLOCK // 2
        value = f"{value[:half]}\n[... {len(value) - 2 * half} characters ...]\n{value[-half:]}"
    lines = value.replace("\r\n", "\n").split("\n")
    return Html("\n".join(html.escape(visible(line)) for line in lines))


def _markup(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, str):
        return text(child)
    if isinstance(child, int | float):
        return str(child)
    return join(child)


def _attribute(key: str, value: str | int | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    name = "viewBox" if name == "viewbox" else name
    return f" {name}" if value is True else f' {name}="{text(str(value))}"'
