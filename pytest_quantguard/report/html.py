"""The report of a run as one HTML file: no script, no network, nothing beside it needed.

Here are the page and what comes first on it; the modules `html_...` make its sections. All texts of
prompts, models, servers and configs are escaped where they enter the markup (`markup.py`), and a content
security policy forbids the page to load or run anything all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

from pytest_quantguard.report import (
    html_accuracy,
    html_generation,
    html_prompts,
    html_runs,
    html_speed,
)
from pytest_quantguard.report.headline import failed_groups, figure, headlines, reason, verdict_line
from pytest_quantguard.report.markup import Child, Html, block, join, tag
from pytest_quantguard.results import NOT_RUN, CheckResult, RunResult

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
SYMBOLS = {"passed": "✔", "failed": "✘", "incomplete": "?"}
SHOWN_MESSAGES = 30


def render_html(result: RunResult, *, changes: tuple[str, str] | None = None) -> str:
    """The whole page. changes: what changed in the config since the last run, and what it did."""
    sections = [
        ("verdict", "Verdict", _verdict(result, changes)),
        ("failures", "What failed", _failures(result)),
        ("budget", "Budget and drift", html_accuracy.budget(result)),
        ("span", "KL along the scored span", html_accuracy.along_span(result)),
        ("distribution", "Distribution of KL against the noise floor", html_accuracy.distribution(result)),
        ("phases", "Prefill against decode", html_accuracy.phases(result)),
        ("tasks", "Per task", html_accuracy.tasks(result)),
        ("worst", "Worst positions", html_accuracy.worst(result)),
        ("speed", "Speed", html_speed.speed(result)),
        ("generation", "Generation", html_generation.generation(result)),
        ("prompts", "Prompts", html_prompts.prompts(result)),
        ("diagnosis", "Diagnosis and notes", html_runs.diagnosis(result)),
        ("environment", "Environment and config", html_runs.environment(result)),
        ("llama-cpp", "In the language of llama.cpp", html_accuracy.llama_cpp(result)),
        ("checks", "All checks", html_runs.checks(result)),
    ]
    return page(f"{result.verdict}: {result.name}", _title(result), sections, _origin(result))


def page(title: str, heading: str, sections: Sequence[tuple[str, str, Html | None]], origin: str) -> str:
    """A whole page of (anchor, title, body); sections without a body are left out."""
    shown = [(anchor, name, body) for anchor, name, body in sections if body is not None]
    links = tag("ul", [tag("li", tag("a", name, href=f"#{anchor}")) for anchor, name, _ in shown])
    body = tag(
        "body",
        tag("a", f"To: {shown[0][1]}", href=f"#{shown[0][0]}", class_="skip"),
        tag("header", tag("h1", heading), tag("nav", links, aria_label="Sections")),
        tag("main", [_section(*section) for section in shown]),
        tag("footer", tag("p", origin, class_="soft small")),
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Html(_style())),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _style() -> str:
    return resources.files("pytest_quantguard.report").joinpath("style.css").read_text(encoding="utf-8")


def _section(anchor: str, title: str, body: Html) -> Html:
    return tag("section", tag("h2", title, id=f"h-{anchor}"), body, id=anchor, aria_labelledby=f"h-{anchor}")


def _title(result: RunResult) -> str:
    return f"{SYMBOLS[result.verdict]} {result.name}: {result.verdict}"


def _origin(result: RunResult) -> str:
    version = result.environment.get("pytest_quantguard", "")
    return f"pytest-quantguard {version}, {result.config_path}, finished {result.finished}"


def _verdict(result: RunResult, changes: tuple[str, str] | None) -> Html:
    lines: list[Child] = [tag("p", tag("strong", verdict_line(result)))]
    if result.partial:
        lines.append(tag("p", "This report is partial: what is not shown was not measured."))
    lines.append(tag("p", reason(result)))
    lines += [tag("p", sentence) for sentence in result.diagnosis]
    who = "unknown, it did not start" if result.candidate is None else result.candidate.title
    parts: list[Child] = [
        tag("div", lines, class_=f"verdict {result.verdict}"),
        _cards(result),
        tag("p", f"Candidate: {who}."),
        tag("p", f"Baseline: {result.baseline_path}{_suite(result)}."),
    ]
    if changes is not None:
        parts.append(tag("h3", "Since the last run"))
        parts.append(tag("ul", [tag("li", line) for line in changes if line]))
    return join(parts)


def _suite(result: RunResult) -> str:
    suite = (result.baseline or {}).get("suite")
    if not suite:
        return ""
    return f", {suite['prompt_count']} prompts, {suite['score_tokens']} positions each, K = {suite['width']}"


def _cards(result: RunResult) -> Html | None:
    """The figures that matter most, each the worst of all cells."""
    cards = [
        _card(f"{item.metric}, worst cell", figure(item.value), f"{item.where} {item.bound}".strip())
        for item in headlines(result)
    ]
    drifts = [check for check in result.checks if check.kind == "drift" and check.value is not None]
    if drifts:
        worst = max(drifts, key=lambda check: check.value or 0.0)
        cards.append(_card("largest drift", figure(worst.value or 0.0, worst.unit), worst.id))
    cards += [_card(*card) for card in (*html_speed.cards(result), *html_generation.cards(result))]
    return tag("dl", cards, class_="cards") if cards else None


def _card(name: str, value: str, remark: str) -> Html:
    return tag("div", tag("dt", name), tag("dd", value, tag("small", remark)))


def _failures(result: RunResult) -> Html | None:
    groups = failed_groups(result)
    if not groups:
        return None
    sentences = tag("ul", [tag("li", group.sentence) for group in groups])
    firsts = [group.worst for group in groups]
    others = [check for check in _distinct(result.failures) if check not in firsts]
    shown = [_message(check, is_open=index == 0) for index, check in enumerate(firsts[:SHOWN_MESSAGES])]
    parts: list[Child] = [sentences, tag("h3", "The worst of each"), *shown]
    if others:
        left_out = len(others) - SHOWN_MESSAGES
        rest = tag("p", f"{left_out} further messages are in result.json.") if left_out > 0 else None
        folded = [_message(check) for check in others[:SHOWN_MESSAGES]]
        parts.append(tag("details", tag("summary", f"{len(others)} further messages"), folded, rest))
    return join(parts)


def _message(check: CheckResult, *, is_open: bool = False) -> Html:
    text = tag("pre", block(check.message or "no message"), tabindex=0, role="region", aria_label=check.id)
    return tag("details", tag("summary", f"{check.id}: {check.outcome}"), text, open=is_open)


def _distinct(checks: list[CheckResult]) -> list[CheckResult]:
    """Without those that only refer to the message of another check."""
    return [check for check in checks if not check.message.startswith(NOT_RUN)]
