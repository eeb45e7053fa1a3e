"""The HTML and PNG reports: whole, self-contained and the same every time."""

from __future__ import annotations

import base64
import html
import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from helpers_replay import domain_trace

from moeserve_placement.placement import PlacementError
from moeserve_placement.planners import Budget
from moeserve_placement.replay import (
    BudgetSpec,
    Comparison,
    PlannerSpec,
    ReplaySettings,
    compare,
)
from moeserve_placement.replay.results import Spread
from moeserve_placement.report.figures import drawn, pictures
from moeserve_placement.report.html import check_report, save_report, to_html, to_png
from moeserve_placement.report.plotting import new_figure
from moeserve_placement.report.words import bytes_words, printable, spread_words
from moeserve_placement.topology import Topology
from moeserve_placement.traces import CountTrace, RoutingTrace


def comparison(trace: RoutingTrace | CountTrace | None = None, **given: object) -> Comparison:
    options = {
        "topology": Topology.uniform(4, 3, num_nodes=2, bytes_per_expert=1000),
        "settings": ReplaySettings(batch_sizes=(16, 32), window=32),
        "budgets": [BudgetSpec(label="2 copies", budget=Budget(max_copies=2)), BudgetSpec()],
        "name": "<tiny> & mean",
    } | given
    specs = [PlannerSpec(name="eplb"), PlannerSpec(name="scenario")]
    return compare(trace or domain_trace(), specs, **options)  # type: ignore[arg-type]


class _Page(HTMLParser):
    """Collects tags, their addresses and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [v or "" for k, v in attrs if k in ("src", "href", "data", "action")]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def page_of(text: str) -> _Page:
    page = _Page()
    page.feed(text)
    return page


@pytest.fixture(scope="module")
def found() -> Comparison:
    """One comparison for all tests that only read it."""
    pytest.importorskip("matplotlib")
    return comparison()


@pytest.fixture(scope="module")
def text(found: Comparison) -> str:
    """Its page."""
    return to_html(found)


def test_the_page_needs_no_other_file_and_no_script(text: str) -> None:
    page = page_of(text)
    assert page.sources and all(s.startswith("data:image/svg+xml;base64,") for s in page.sources)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert "@import" not in text and "url(" not in re.sub(r'src="[^"]*"', "", text)


def test_every_picture_is_svg_that_names_no_address(text: str) -> None:
    page = page_of(text)
    assert page.tags.count("img") == page.tags.count("figcaption") == 7
    for source in page.sources:
        svg = base64.b64decode(source.split(",", 1)[1])
        assert ElementTree.fromstring(svg).tag.endswith("svg")
        addresses = re.findall(rb'(?:href|src)="([^"]*)"', svg)
        assert all(address.startswith((b"#", b"data:")) for address in addresses)


def test_names_from_outside_are_escaped_and_all_planners_are_there(text: str) -> None:
    assert "<tiny>" not in text and "&lt;tiny&gt; &amp; mean" in text
    words = " ".join(page_of(text).words)
    for name in ("linear", "eplb", "eplb (2 copies)", "scenario", "scenario (2 copies)"):
        assert name in words


def test_reports_are_written_whole_and_equal_results_give_equal_pages(
    tmp_path: Path, found: Comparison, text: str
) -> None:
    save_report(found, tmp_path / "r.png")
    save_report(found, tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text() == text
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "r.html").read_text().rstrip().endswith("</html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.html", "r.png"]


def test_odd_comparisons_can_be_drawn_too() -> None:
    """Counts only; one window; loads of zero; several seeds; a single rank."""
    pytest.importorskip("matplotlib")
    zeros = CountTrace(counts=np.zeros((3, 1, 4), dtype=np.int64), layer_ids=(0,))
    assert "</html>" in to_html(comparison(zeros))
    shuffled = ReplaySettings(batch_sizes=(128,), window=128, order="shuffle")
    for odd in (
        comparison(settings=shuffled, seeds=(0, 1)),
        comparison(topology=Topology.uniform(1, 8)),
    ):
        for picture in pictures(odd):
            picture.draw(new_figure(picture.width, picture.height), odd)


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize("label", ["$x^$", r"\$x$", "$", "a\x00b\x1b", "</text>", "\ud800"])
def test_names_are_drawn_as_they_are_never_as_formulas(tmp_path: Path, label: str) -> None:
    pytest.importorskip("matplotlib")
    data = domain_trace()
    labels = tuple(label if name == (data.labels or ())[0] else name for name in data.labels or ())
    found = comparison(replace(data, labels=labels), name=label)
    text = to_html(found)
    assert html.escape(printable(label)) in text
    for source in page_of(text).sources:
        ElementTree.fromstring(base64.b64decode(source.split(",", 1)[1]))
    assert to_png(found).startswith(b"\x89PNG")


def test_a_dollar_sign_is_drawn_as_one() -> None:
    pytest.importorskip("matplotlib")
    figure = new_figure(2, 2)
    for text in ("$x^$", r"\$x$", "$", "a$b", "$$"):
        shown, is_formula = figure.text(0, 0, drawn(text))._preprocess_math(drawn(text))
        assert (shown, is_formula) == (text, False)


def test_printable_text_is_left_alone_and_the_rest_is_replaced() -> None:
    for text in ("law", "[/x]", "日本 café", "a  b"):
        assert printable(text) == text
    assert printable("a\tb\nc") == "a b c"
    assert printable("\x1b[31m\u202e\x00\ud800\u2028") == "\ufffd[31m\ufffd\ufffd\ufffd\ufffd"


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlacementError, match=r"needs matplotlib; .* 'moeserve\[plot\]'"):
        check_report([Path("report.html")])


def test_another_ending_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"must end in .html or .png"):
        check_report([Path("report.pdf")])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (17_301_504, "17.3 MB"),
        (1.2345e9, "1.23 GB"),
        (999.6, "1.00 kB"),
        (5e15, "5,000 TB"),
    ],
)
def test_bytes_are_written_with_three_digits(value: float, words: str) -> None:
    assert bytes_words(value) == words


def test_a_spread_shows_half_its_range() -> None:
    assert spread_words(Spread.of([1.0, 1.5, 2.0])) == "1.500±0.500"
    assert spread_words(Spread.of([1.25])) == "1.250"
    assert spread_words(None) == "-"
