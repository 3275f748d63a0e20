"""Sections of the HTML report about everything else than log-probabilities: speed, generation, diagnosis,
where it ran, all checks. Each returns None where the run has nothing of the kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from pytest_quantguard.report.headline import bound_text, figure, first_line
from pytest_quantguard.report.html_accuracy import scrolled
from pytest_quantguard.report.markup import Child, Html, block, join, tag
from pytest_quantguard.results import RunResult

LONGEST_CONFIG = 20_000


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
            facts |= manifest.get("model", {})
            parts += [tag("h3", title), _facts(facts), _folded(f"Manifest of the {title.lower()}", manifest)]
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
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_fact(item)}" for key, item in value.items())
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
                tag("td", check.outcome + (" (interval reaches the bound)" if check.near_bound else "")),
                tag("td", value),
                tag("td", bound_text(check)),
                tag("td", first_line(check.message), class_="wrap"),
            )
        )
    heads = [tag("th", name, scope="col") for name in ("check", "outcome", "value", "bound", "grounds")]
    table = scrolled("Every check", tag("thead", tag("tr", heads)), tag("tbody", rows))
    return tag("details", tag("summary", f"{len(result.checks)} checks"), table, class_="paper")
