"""The HTML report: one file that loads nothing, well-formed, accessible, and deaf to what texts say."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_quantguard.report import charts
from pytest_quantguard.report.html import render_html
from pytest_quantguard.report.html_accuracy import budget, llama_cpp
from pytest_quantguard.report.html_prompts import composition_parts
from pytest_quantguard.report.markup import Html, block, tag
from pytest_quantguard.results import read_result, write_result
from tests.report.samples import HOSTILE, full
from tests.report.test_terminal import check, result

VOID = {"meta", "br", "hr", "link", "img", "input"}
WORDS = """html head meta title style body a header nav main footer section article h1 h2 h3 p ul li dl dt
    dd div span small strong code pre mark bdi i table caption colgroup col thead tbody tr th td
    details summary figure figcaption svg g path text circle"""
ALLOWED = frozenset(WORDS.split())


class Page(HTMLParser):
    """Elements with their attributes and texts; fails on what is not nested."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.said: list[str] = []
        self.first_texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))
        self.first_texts.append("")
        assert len(attributes) == len(dict(attributes)), f"an attribute twice in {name}"
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.said.append(data)
            if self.elements:  # None before the document type.
                self.first_texts[-1] = self.first_texts[-1] or data

    @property
    def text(self) -> str:
        return "".join(self.said)

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for element, attributes in self.elements if element == name]


@pytest.fixture(scope="module")
def hostile() -> Page:
    return Page(render_html(full(HOSTILE), changes=(HOSTILE, HOSTILE)))


def test_texts_stay_texts(hostile: Page) -> None:
    assert {name for name, _ in hostile.elements} <= ALLOWED
    attributes = {name for _, found in hostile.elements for name in found}
    assert not {name for name in attributes if name.startswith("on")}
    assert "src" not in attributes
    assert hostile.text.count("<script>alert(1)</script>") > 20
    assert not any(one in hostile.text for one in "\x1b\x07\x00\u202e\u2066\u200b\ud800")
    assert "\\x1b[31mred" in hostile.text
    assert "\\u202egnp.exe" in hostile.text


def test_nothing_is_loaded(hostile: Page) -> None:
    assert all((link.get("href") or "").startswith("#") for link in hostile.all("a"))
    policy = next(meta for meta in hostile.all("meta") if meta.get("http-equiv"))
    assert "default-src 'none'" in (policy["content"] or "")
    assert "url(" not in render_html(full()), "no font or image in the style either"
    assert "http" not in render_html(full()).replace("http-equiv", "")


def test_links_lead_somewhere(hostile: Page) -> None:
    ids = [found["id"] for _, found in hostile.elements if "id" in found]
    assert len(ids) == len(set(ids))
    assert {(link["href"] or "")[1:] for link in hostile.all("a")} <= set(ids)
    for section in hostile.all("section"):
        assert section["aria-labelledby"] in ids


def test_readable_without_eyes(hostile: Page) -> None:
    assert hostile.all("html") == [{"lang": "en"}]
    assert all(cell.get("scope") for cell in hostile.all("th"))
    for drawing in hostile.all("svg"):
        assert drawing.get("aria-hidden") == "true" or (drawing["role"], bool(drawing["aria-label"])) == (
            "img",
            True,
        )
    regions = [one for one in hostile.all("div") + hostile.all("pre") if one.get("role") == "region"]
    assert regions
    assert all(one["tabindex"] == "0" and one["aria-label"] for one in regions)
    headings = {
        attributes["id"]: text
        for (name, attributes), text in zip(hostile.elements, hostile.first_texts, strict=True)
        if name == "h2"
    }
    names = [headings[str(one["aria-labelledby"])] for one in hostile.all("section")]
    names += [str(one["aria-label"]) for one in regions]
    assert len(names) == len(set(names)), "a reader who jumps between them can tell them apart"
    levels = [int(name[1]) for name, _ in hostile.elements if name in ("h1", "h2", "h3")]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_every_section_is_there(hostile: Page) -> None:
    found = [section["id"] for section in hostile.all("section")]
    assert " ".join(str(name) for name in found) == (
        "verdict failures budget span distribution phases tasks worst speed generation prompts diagnosis "
        "environment llama-cpp checks"
    )


def test_what_a_red_build_must_tell_comes_first() -> None:
    text = Page(render_html(full())).text
    order = [
        "gate: FAILED",
        "This report is partial",
        "look at the scales of plain",
        "worst cell",
        "The worst of each",
    ]
    assert sorted(order, key=text.index) == order
    assert "kl_mean in decode bs 1: 0.9000, at most 0.5" in text
    assert "it is bad" in text


def test_a_run_without_anything_is_shown_too() -> None:
    page = Page(render_html(result([], verdict="incomplete", partial=True, candidate=None, baseline=None)))
    assert "unknown, it did not start" in page.text
    assert [section["id"] for section in page.all("section")] == ["verdict", "environment"]


def test_the_flip_is_marked_and_both_sides_are_shown() -> None:
    page = Page(render_html(full()))
    assert {"class": "flag"} in page.all("span")
    assert page.all("tr").count({"class": "flip"}) == 2
    text = page.text
    for side in ("BF16, top 2", "candidate, top 2", "confident flip", "(0.010)", "(–)", "\ufffd <7>"):
        assert side in text


def test_speed_and_generation_are_shown_with_their_evidence() -> None:
    text = Page(render_html(full())).text
    for fact in ("2.500 [2.400, 2.600]", "the accepted record", "≤ 1.1", "25 % slower", "warm-up not steady"):
        assert fact in text
    assert "4.5% (5 runs, by 1.5%)" in text
    doubted = full()
    for slow in doubted.checks:
        for verdict in slow.speed.verdicts if slow.speed is not None else []:
            verdict.reasons.append("<b>a hot GPU")
    assert "25 % slower; <b>a hot GPU" in Page(render_html(doubted)).text, "a doubt with its reason, as text"
    for fact in ("reference's", "ended by length", "0.200 to 0.800", "1 + 1", "3 further answers changed"):
        assert fact in text


def test_heat_follows_the_use_of_the_bound() -> None:
    values = {1: (0.1, "h0"), 3: (0.25, "h1"), 8: (0.48, "h3"), 32: (0.9, "h5")}
    checks = [
        check("accuracy", "prefill", size, "kl_mean", value, outcome="failed" if value > 0.5 else "passed")
        for size, (value, _) in values.items()
    ]
    checks += [check("accuracy", "prefill", 1, "agreement", 0.99, bound=0.98, bound_side="min")]
    table = budget(result(checks))
    assert table is not None
    cells = [found.get("class") for found in Page(table).all("td")]
    assert cells[:4] == [heat for _, heat in values.values()]
    assert cells[5] == "h1", "half of what may be missing to 1 is used"
    assert "0.9000 !" in Page(table).text


def test_huge_texts_stay_small() -> None:
    page = render_html(full("word " * 100_000))
    assert len(page) < 1_500_000
    assert "characters ...]" in page


def test_the_language_of_llama_cpp() -> None:
    table = llama_cpp(full())
    assert table is not None
    text = Page(table).text
    assert text.count("0.41 ± 0.02") == 4
    assert text.count("70 %") == 4
    for name in ("Mean KLD", "99.0 % KLD", "Same top p", "Mean ln(PPL(Q)/PPL(base))"):
        assert name in text


def test_charts_of_nothing_but_zeros_and_single_points() -> None:
    series = [charts.Series("one", ((0.0, 0.0),))]
    drawings = [
        charts.lines("a", "b", series, labels=("x", "y")),
        charts.histogram("a", "b", [1e-3, 1e-2, 1e-1], [("one", [0.0, 0.0])], labels=("x", "y")),
        charts.scatter("a", "b", [charts.Mark(0.0, 0.0, "t", HOSTILE)], labels=("x", "y")),
    ]
    for drawing in drawings:
        assert "nan" not in Page(drawing).text
        assert "<script" not in drawing


def test_charts_put_values_where_they_belong() -> None:
    axis = charts.Axis(1e-3, 10, 0, 400, logarithmic=True)
    assert [axis.at(value) for value in (1e-3, 1e-2, 1, 10, 100, 0)] == [0, 100, 300, 400, 400, 0]
    assert [name for _, name in axis.ticks()] == ["0.001", "0.01", "0.1", "1", "10"]
    linear = charts.Axis(0, 7, 100, 0)
    assert [linear.at(value) for value in (0, 3.5, 7)] == [100, 50, 0]
    assert [value for value, _ in linear.ticks()] == [0, 2, 4, 6]


@given(
    places=st.lists(
        st.tuples(st.floats(1e-3, 10), st.floats(1e-3, 10), st.text("ab-0", max_size=24)),
        min_size=1,
        max_size=9,
    )
)
@settings(max_examples=60, deadline=None)
def test_names_of_a_scatter_plot_lie_on_none_of_each_other(places: list[tuple[float, float, str]]) -> None:
    marks = [charts.Mark(x, y, "t", name) for x, y, name in places]
    page = Page(charts.scatter("a", "b", marks, labels=("x", "y")))
    shown = re.findall(
        r'<text x="([-\d.]+)" y="([-\d.]+)" class="name">([^<]*)',
        charts.scatter("a", "b", marks, labels=("x", "y")),
    )
    boxes = [(float(x), float(x) + 5.5 * len(name), float(y) - 8, float(y)) for x, y, name in shown]
    for one, other in combinations(boxes, 2):
        apart = one[1] <= other[0] or other[1] <= one[0] or one[3] <= other[2] or other[3] <= one[2]
        assert apart, shown
    assert all(box[0] >= charts.LEFT and box[1] <= charts.WIDTH for box in boxes), "within the axes"
    assert len(page.all("circle")) == len(marks), "left out is a name, never a mark"


def test_a_lone_mark_has_its_name_beside_it() -> None:
    drawing = charts.scatter("a", "b", [charts.Mark(1, 1, "t", "mine")], labels=("x", "y"))
    [(x, y)] = re.findall(r'<text x="([-\d.]+)" y="([-\d.]+)" class="name">mine', drawing)
    [(cx, cy)] = re.findall(r'cx="([-\d.]+)" cy="([-\d.]+)"', drawing)
    assert (float(x) - float(cx), float(y) - float(cy)) == pytest.approx((7, 4))


def test_the_prompts_of_a_run_are_told_as_analyze_tells_them(tmp_path: Path) -> None:
    write_result(tmp_path, full("niah"))
    read = read_result(tmp_path)
    assert read.prompts == full("niah").prompts, "what is read is what was written"
    page = Page(render_html(read))
    assert "2 prompts of 1 tasks, " in page.text
    assert (
        "Nobody looked for near duplicates: that needs pip install 'pytest-quantguard[analysis]'."
        in page.text
    )
    assert read.prompts is not None
    for _, _, part in composition_parts(read.prompts):
        assert part in render_html(read)
    found = replace(read.prompts, near_duplicates=(("niah", "other"),))
    told = Page(render_html(read.model_copy(update={"prompts": found}))).text
    assert "1 group of near duplicates.niah, other" in told
    assert "prompts" not in [one["id"] for one in Page(render_html(full(prompts=None))).all("section")]


def test_markup_escapes_what_is_not_markup() -> None:
    assert tag("p", "<b>", Html("<b></b>"), None, ["&", 1]) == "<p>&lt;b&gt;<b></b>&amp;1</p>"
    assert tag("p", class_="a", title='"><x', hidden=True, lang=None) == (
        '<p class="a" title="&quot;&gt;&lt;x" hidden></p>'
    )
    assert block("a\n<\x1b") == "a\n&lt;\\x1b"
    assert block("<" * 20_003) == f"{'&lt;' * 10_000}\n[... 3 characters ...]\n{'&lt;' * 10_000}"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a headless Chromium")
def test_a_browser_has_nothing_to_complain_of(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(render_html(full(HOSTILE)), encoding="utf-8")
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --enable-logging=stderr --v=0 --dump-dom"
    )
    done = subprocess.run(
        ["chromium", *flags.split(), f"--user-data-dir={tmp_path / 'user'}", str(tmp_path / "report.html")],
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in done.stderr
    assert "<h1>✘ gate: failed</h1>" in done.stdout
