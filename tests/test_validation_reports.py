"""A validation as text and as a page: what is said first, what the tables hold, and that nothing is loaded."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from windtunnel.reports.context import ReportContext
from windtunnel.reports.validation_answer import answer, error_words, spoken
from windtunnel.reports.validation_context import ValidationContext
from windtunnel.reports.validation_figures import validation_figures
from windtunnel.reports.validation_html import write_html
from windtunnel.reports.validation_text import render_text
from windtunnel.sim.metrics.agreement import Agreement, Attribution, Curve, Effect, Headline, MetricError, Overlay

TTFT = MetricError("ttft", "mean", "ms", 100.0, 90.0, -0.1, interval=(-0.15, -0.05))
OUTPUT = MetricError("throughput", "output", "tok/s", 500.0, 510.0, 0.02)
PREEMPTIONS = MetricError("preemptions", "", "", 0.0, 3.0, inf)
USAGE = MetricError("kv_usage", "mean", "%", 0.5, 0.55, 0.05, in_points=True)
CONTEXT = ValidationContext(
    ReportContext(title="chat <b>", model="m", cost_model="affine", version="0.1.0"),
    "windtunnel live",
    "http://127.0.0.1:8000 & co",
    ("Arrivals are drawn.",),
    (("num_gpu_blocks", "61"),),
)


def agreement(*errors: MetricError, **more: Any) -> Agreement:
    return Agreement(
        **{"errors": errors, "overlays": (), "num_live_runs": 1, "num_requests": 80, "num_failed": 0, **more}
    )


def attributed() -> Attribution:
    headline = Headline("mean_ttft_ms", "mean TTFT", "ms", 100.0, 90.0, 99.0)
    exact = Headline("preemptions", "preemptions", "", 4.0, 4.0, 4.0)
    changes = {"mean_ttft_ms": 8.0, "preemptions": 0.0}
    pool = Effect("KV pool", "it had 960 KV tokens, the plan said 4,800", changes, changes)
    return Attribution((headline, exact), (pool,), ("Step times: no recording was given.",))


def curve(*values: float) -> Curve:
    return Curve(np.array(values), np.linspace(0, 1, len(values)))


def test_a_kept_and_a_missed_limit_are_told_first() -> None:
    kept = answer(agreement(replace(TTFT, limit=0.2)))
    missed = answer(agreement(replace(TTFT, limit=0.05), replace(OUTPUT, limit=0.05)))
    assert (kept.headline, kept.tone) == ("The prediction holds", "good")
    assert (missed.headline, missed.tone) == ("The prediction misses 1 of 2 limits", "bad")
    assert "Missed: mean TTFT -10.0 % (limit 5.0 %)." in missed.sentences


def test_without_limits_the_largest_error_of_the_main_numbers_is_told() -> None:
    told = answer(agreement(TTFT, OUTPUT, PREEMPTIONS))
    assert told.headline == "The main numbers are off by 10.0 % at most"
    assert "preemptions live is 0" in told.sentences[0]


def test_that_there_is_no_spread_with_one_run_is_told() -> None:
    assert any("--repeats" in sentence for sentence in answer(agreement(TTFT)).sentences)
    two = agreement(replace(TTFT, spread=0.2), replace(OUTPUT, spread=0.001), num_live_runs=2)
    assert any("Of 2 numbers, 1 is no further off" in sentence for sentence in answer(two).sentences)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TTFT, "-10.0 %"),
        (OUTPUT, "+2.0 %"),
        (PREEMPTIONS, "live is 0"),
        (USAGE, "+5.0 points"),
        (replace(OUTPUT, error=-0.0001), "0.0 %"),
        (replace(USAGE, statistic="over_time"), "5.0 points"),
    ],
)
def test_errors_are_told_with_sign_and_unit(error: MetricError, words: str) -> None:
    assert error_words(error) == words


def test_metrics_are_named_as_in_speech() -> None:
    assert [spoken(each) for each in (TTFT, OUTPUT, PREEMPTIONS, USAGE)] == [
        "mean TTFT",
        "output throughput",
        "preemptions",
        "mean KV usage",
    ]


def test_the_text_has_a_row_for_every_number_and_its_cause() -> None:
    told = render_text(
        agreement(TTFT, OUTPUT, USAGE, attribution=attributed(), causes=("The pool was smaller.",)), CONTEXT
    )
    assert re.search(r"^TTFT, mean +100 ms +90 ms +-10.0 % +-15.0 … -5.0 %$", told, re.MULTILINE)
    assert re.search(r"^KV usage, mean +50 % +55 % +\+5.0 points", told, re.MULTILINE)
    assert re.search(r"^KV pool +\+80.0 % +–$", told, re.MULTILINE)
    assert re.search(r"^left +\+20.0 % +–$", told, re.MULTILINE)
    for sentence in ("- The pool was smaller.", "- Arrivals are drawn.", "Not swapped: Step times: no recording"):
        assert sentence in told


def opposing() -> Attribution:
    headline = Headline("mean_ttft_ms", "mean TTFT", "ms", 100.0, 98.0, 100.0)
    pool = Effect("KV pool", "it was larger", {"mean_ttft_ms": -50.0}, {"mean_ttft_ms": -50.0})
    steps = Effect("step times", "they were slower", {"mean_ttft_ms": 51.0}, {"mean_ttft_ms": 51.0})
    return Attribution((headline,), (pool, steps))


def test_large_effects_that_cancel_each_other_are_told_in_points_of_the_metric(tmp_path: Path) -> None:
    made = agreement(TTFT, attribution=opposing())
    write_html(tmp_path / "page.html", made, CONTEXT)
    for text in (render_text(made, CONTEXT), (tmp_path / "page.html").read_text("utf-8")):
        assert all(words in text for words in ("-50.0 points", "+51.0 points", "-1.0 points", "Points: by how much"))
        assert "2500" not in text.partition("<script")[0].replace(",", "")
    assert "attribution" not in [each.name for each in validation_figures(made)]


def test_a_second_cause_is_told_at_once_if_none_explains_most_alone() -> None:
    alone, half = attributed(), attributed()
    small = replace(
        half.effects[0], first={"mean_ttft_ms": 4.0, "preemptions": 0.0}, last={"mean_ttft_ms": 4.0, "preemptions": 0.0}
    )
    half = replace(half, effects=(small,))
    causes = ("First.", "Second.", "Third.")
    told = [answer(agreement(TTFT, attribution=each, causes=causes)).sentences for each in (alone, half)]
    assert [len(set(causes) & set(sentences)) for sentences in told] == [1, 2]


def test_requests_that_failed_are_told_beside_the_first_cause() -> None:
    causes = ("10 of 20 requests failed.", "Steps are slower.", "Third.")
    sentences = answer(agreement(TTFT, num_failed=10, attribution=attributed(), causes=causes)).sentences
    assert sentences[-2:] == causes[:2]


def test_columns_that_say_nothing_are_left_out() -> None:
    told = render_text(agreement(OUTPUT), CONTEXT)
    assert not any(head in told for head in ("95 % interval", "Live spread", "Verdict"))


def full() -> Agreement:
    overlays = (
        Overlay("ttft", "ms", (curve(1, 2, 3), curve(1, 2, 4)), curve(1, 2, 5), is_distribution=True),
        Overlay("running", "requests", (curve(0, 1, 2),), curve(0, 1, 2), is_distribution=False),
        Overlay(
            "waiting", "requests", (Curve(np.arange(3.0), np.zeros(3)),), Curve(np.arange(3.0), np.zeros(3)), False
        ),
    )
    errors = (replace(TTFT, limit=0.05, spread=0.01), OUTPUT, PREEMPTIONS, USAGE)
    return agreement(*errors, overlays=overlays, num_live_runs=2, attribution=attributed(), causes=("A <cause>.",))


def test_what_was_0_all_the_time_is_not_drawn() -> None:
    assert [each.name for each in validation_figures(full())] == ["errors", "cdf-ttft", "level-running", "attribution"]


def test_the_error_figure_shows_intervals_spread_and_limits() -> None:
    figure = validation_figures(full())[0]
    spread, error, limit = figure.data
    assert (spread["base"][0], spread["x"][0]) == (-1.0, 2.0)
    assert error["x"] == [-10.0, 2.0]
    assert (error["error_x"]["arrayminus"][0], error["error_x"]["array"][0]) == (5.0, 5.0)
    assert limit["x"] == [-5.0, 5.0]


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "link", "iframe") and (given.get("src") or given.get("href")):
            self.loaded.append(tag)
        if given.get("id"):
            self.ids.append(str(given["id"]))
        if tag == "a":
            self.links.append(str(given.get("href")))


def test_the_page_is_whole_and_loads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_html(path, full(), CONTEXT)
    text = path.read_text("utf-8")
    page = _Page()
    page.feed(text)
    assert page.loaded == []
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    assert "chat &lt;b&gt;" in text
    assert "A &lt;cause&gt;." in text
    assert "http://127.0.0.1:8000 &amp; co" in text
    assert "simulated; nothing here was measured" not in text


def test_the_same_agreement_gives_the_same_page(tmp_path: Path) -> None:
    pages = []
    for name in ("a.html", "b.html"):
        write_html(tmp_path / name, full(), CONTEXT)
        pages.append((tmp_path / name).read_bytes())
    assert pages[0] == pages[1]
