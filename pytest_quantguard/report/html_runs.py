"""Sections of the HTML report about everything else than log-probabilities: speed, generation, diagnosis,
where it ran, all checks. Each returns None where the run has nothing of the kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import yaml

from pytest_quantguard.report.headline import bound_text, figure, first_line
from pytest_quantguard.report.html_accuracy import scrolled
from pytest_quantguard.report.markup import Child, Html, block, join, tag
from pytest_quantguard.results import CheckResult, RunResult

Card = Callable[[str, str, str], Html]
LONGEST_CONFIG = 20_000


def headline_cards(result: RunResult, card: Card) -> list[Html]:
    """The speed figure with the largest value."""
    speeds = [check for check in result.checks if check.kind == "speed" and check.value is not None]
    if not speeds:
        return []
    best = max(speeds, key=lambda check: check.value or 0.0)
    return [card(f"speed, {best.unit or ''}", figure(best.value or 0.0), best.id)]


def speed(result: RunResult) -> Html | None:
    """Every timed scenario with its figures."""
    checks = [check for check in result.checks if check.kind == "speed"]
    return _figures_table("Timed scenarios", checks) if checks else None


def generation(result: RunResult) -> Html | None:
    """Nothing is generated yet that is judged."""
    return None


def _figures_table(name: str, checks: list[CheckResult]) -> Html:
    extras = list(
        dict.fromkeys(key for check in checks for key, value in check.extra.items() if _plain(value))
    )
    heads = ("check", "value", "unit", "95 % interval", "bound", "outcome", *extras)
    rows = []
    for check in checks:
        interval = (
            "" if check.interval is None else " to ".join(figure(v, check.unit) for v in check.interval)
        )
        value = "" if check.value is None else figure(check.value, check.unit)
        cells = (value, check.unit or "", interval, bound_text(check), check.outcome)
        rows.append(
            tag(
                "tr",
                tag("th", check.id, scope="row"),
                [tag("td", cell) for cell in cells],
                [tag("td", _plain_text(check.extra.get(key))) for key in extras],
            )
        )
    head = tag("thead", tag("tr", [tag("th", head, scope="col") for head in heads]))
    return scrolled(name, head, tag("tbody", rows))


def _plain(value: object) -> bool:
    return isinstance(value, int | float | str)


def _plain_text(value: object) -> str:
    return figure(value) if isinstance(value, float) else "" if value is None else str(value)


def diagnosis(result: RunResult) -> Html | None:
    """Patterns in the table of the run, and what had to be said about measuring it."""
    parts: list[Child] = []
    if result.diagnosis:
        parts.append(tag("ul", [tag("li", sentence) for sentence in result.diagnosis]))
    elif result.cells:
        parts.append(tag("p", "No pattern that points to a cause was seen."))
    if result.notes:
        parts += [tag("h3", "Notes"), tag("ul", [tag("li", note) for note in result.notes])]
    return join(parts) if parts else None


def environment(result: RunResult) -> Html:
    """Who answered, on what, against which recording, by which config. Secrets were masked before."""
    parts: list[Child] = []
    server = result.candidate
    if server is not None:
        said = server.model_dump(exclude={"capabilities"})
        parts += [tag("h3", "Candidate"), _facts(said)]
        parts.append(_folded("What the server says of itself", server.capabilities))
    for title, manifest in (("Baseline", result.baseline), ("Accepted run", result.accepted)):
        if manifest is not None:
            facts = {key: manifest.get(key) for key in ("name", "created", "package_version")}
            facts |= {f"model {key}": value for key, value in manifest.get("model", {}).items()}
            parts += [tag("h3", title), _facts(facts), _folded("Its manifest", manifest)]
    times = {"started": result.started, "finished": result.finished, "seconds": result.seconds}
    parts += [tag("h3", "Run"), _facts({**result.environment, **times, "config": result.config_path})]
    parts.append(_folded("The config, complete", result.config))
    return join(parts)


def _facts(facts: Mapping[str, Any]) -> Html:
    rows = [
        (tag("dt", key.replace("_", " ")), tag("dd", _fact(value)))
        for key, value in facts.items()
        if value not in (None, "", [], {})
    ]
    return tag("dl", [part for row in rows for part in row], class_="facts")


def _fact(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)


def _folded(title: str, value: Any) -> Html:
    dumped = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=100)[:LONGEST_CONFIG]
    content = tag("pre", block(dumped), tabindex=0, role="region", aria_label=title)
    return tag("details", tag("summary", title), content)


def checks(result: RunResult) -> Html | None:
    """One row for each check, with the sentence of its verdict."""
    if not result.checks:
        return None
    rows = []
    for check in result.checks:
        value = "" if check.value is None else figure(check.value, check.unit)
        rows.append(
            tag(
                "tr",
                tag("th", check.id, scope="row"),
                tag("td", check.outcome + (" (near the bound)" if check.near_bound else "")),
                tag("td", value),
                tag("td", bound_text(check)),
                tag("td", first_line(check.message), class_="wrap"),
            )
        )
    heads = [tag("th", name, scope="col") for name in ("check", "outcome", "value", "bound", "grounds")]
    table = scrolled("All checks", tag("thead", tag("tr", heads)), tag("tbody", rows))
    return tag("details", tag("summary", f"{len(result.checks)} checks"), table, class_="paper")
