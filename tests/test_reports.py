"""Reports: the text table, the answer and its reasons in words, the figures' data, and the HTML file."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from built_records import (
    MS,
    UNFINISHED,
    AffineStepCost,
    S,
    pressed_engine,
    queue_at,
    single_server,
    token_records,
    with_requests,
    workload_of,
)
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.reports.answer import answer
from windtunnel.reports.causes import Causes, WaitCause, shares_of_waiting, wait_causes, worst_requests
from windtunnel.reports.context import ReportContext, ResolvedValue
from windtunnel.reports.figures import MAX_RAW_STEPS, NUM_BUCKETS, _envelope, figures, time_axis
from windtunnel.reports.files import atomic_writer
from windtunnel.reports.html import write_html
from windtunnel.reports.text import render_text
from windtunnel.reports.words import count, milliseconds, percent
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.metrics import Summary, summarize
from windtunnel.sim.records import Outcome, Records, StepTable
from windtunnel.sim.simulate import run
from windtunnel.sim.workload import workload

CONTEXT = ReportContext(
    title="a <run> & its name",
    model="Llama-3.1-8B",
    gpu="1 x H100",
    engine="vLLM 0.32",
    cost_model="roofline",
    cost={"name": "roofline", "assumed": "</script><b>"},
    resolved=(ResolvedValue("engine", "max_num_seqs", 256, "default of vLLM 0.32"),),
    seed=7,
    version="0.1.0",
    workload={"num_requests": 80},
    notes=("unit of time: <ms>",),
    warnings=("watch <out>",),
)


@pytest.fixture(scope="module")
def pressed() -> tuple[Records, Summary]:
    load, config = pressed_engine()
    records = run(load, config, AffineStepCost())
    return records, summarize(records, load, slo="ttft:p99<1ms itl:p50<60min", goodput="ttft:500")


@pytest.fixture(scope="module")
def page(pressed: tuple[Records, Summary], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_html(path, *pressed, CONTEXT)
    return path.read_text(encoding="utf-8")


# --- text


def test_the_table_has_the_rows_of_vllm_bench_serve_in_its_order() -> None:
    records, load = queue_at(0.5, 200, 1)
    lines = render_text(summarize(records, load, percentiles=(99,)), CONTEXT).splitlines()
    start = lines.index("============ Serving Benchmark Result ============")
    labels = [line[:40].rstrip() if ":" in line else line.strip("-") for line in lines[start + 1 :]]
    assert labels[: labels.index("P99 E2EL (ms):") + 1] == [
        "Successful requests:",
        "Failed requests:",
        "Request rate configured (RPS):",
        "Benchmark duration (s):",
        "Total input tokens:",
        "Total generated tokens:",
        "Request throughput (req/s):",
        "Output token throughput (tok/s):",
        "Peak output token throughput (tok/s):",
        "Peak concurrent requests:",
        "Total token throughput (tok/s):",
        "Time to First Token",
        "Mean TTFT (ms):",
        "Median TTFT (ms):",
        "P99 TTFT (ms):",
        "Time per Output Token (excl. 1st token)",
        "Mean TPOT (ms):",
        "Median TPOT (ms):",
        "P99 TPOT (ms):",
        "Inter-token Latency",
        "Mean ITL (ms):",
        "Median ITL (ms):",
        "P99 ITL (ms):",
        "End-to-end Latency",
        "Mean E2EL (ms):",
        "Median E2EL (ms):",
        "P99 E2EL (ms):",
    ]


def test_values_stand_where_vllm_puts_them_with_two_decimals() -> None:
    records = token_records((0, [0, 1, 2]), (0, [3, 5]))
    text = render_text(summarize(records, workload_of(records)))
    assert "Successful requests:                     2         \n" in text
    assert "Benchmark duration (s):                  0.06      \n" in text
    assert "Mean ITL (ms):                           13.33     \n" in text


def test_the_header_names_the_cost_model_and_says_uncalibrated(pressed: tuple[Records, Summary]) -> None:
    text = render_text(pressed[1], CONTEXT)
    assert "Cost model: roofline, uncalibrated" in text
    assert "Engine: vLLM 0.32 (simulated)" in text
    assert "uncalibrated" not in render_text(pressed[1], replace(CONTEXT, calibrated=True))


def test_warnings_come_last(pressed: tuple[Records, Summary]) -> None:
    lines = render_text(pressed[1], CONTEXT).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("WARNING"))
    assert lines[first] == "WARNING: watch <out>"
    assert lines[first - 1] == "=" * 50
    assert all(line.startswith(("WARNING: ", " " * 9)) for line in lines[first:])


def test_an_overloaded_run_says_so_before_any_latency() -> None:
    text = render_text(summarize(*queue_at(1.3, 2000, 1)))
    assert text.index("OVERLOADED") < text.index("Not a steady state") < text.index("Time to First Token")
    assert "OVERLOADED" not in render_text(summarize(*queue_at(0.5, 2000, 1)))


def test_what_was_not_measured_is_a_dash() -> None:
    records = with_requests(token_records((0, [0])), outcome=np.array([UNFINISHED]))
    text = render_text(summarize(records, workload_of(records)))
    assert re.search(r"^Mean TTFT \(ms\): +–$", text, re.MULTILINE)


def test_objectives_show_what_was_measured(pressed: tuple[Records, Summary]) -> None:
    text = render_text(pressed[1])
    assert re.search(r"^ttft:p99<1ms +FAIL  [\d,.]+ ms", text, re.MULTILINE)
    assert re.search(r"^itl:p50<60min +PASS  10.00 ms", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.4213, "0.421 ms"), (87.5, "87.5 ms"), (999.6, "1000 ms"), (1240, "1.24 s"), (6e5, "10.0 min")],
)
def test_durations_have_the_unit_that_suits_them(value: float | None, text: str) -> None:
    assert milliseconds(value) == text


def test_shares_and_counts_are_short() -> None:
    assert (percent(0.0312), percent(0.4), percent(None)) == ("3.1 %", "40 %", "–")
    assert (count(3953.06), count(7.718), count(12.0), count(134.91)) == ("3,953", "7.72", "12", "134.9")


# --- causes and answer


def seats_short() -> tuple[Records, Summary]:
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=256, num_gpu_blocks=2000)
    load = workload(np.arange(60) * 20 * MS, [20] * 60, [30] * 60)
    records = run(load, config, AffineStepCost())
    return records, summarize(records, load)


def budget_short() -> Records:
    config = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=64, max_model_len=2048, num_gpu_blocks=5000)
    return run(workload([0] * 60, [600] * 60, [2] * 60), config, AffineStepCost())


def blocks_short() -> Records:
    config = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=256, num_gpu_blocks=40)
    return run(workload([0] * 60, [100] * 60, [100] * 60), config, AffineStepCost())


def test_the_reason_for_waiting_is_what_was_used_up() -> None:
    assert next(iter(shares_of_waiting(seats_short()[0]))) is WaitCause.SEATS
    assert next(iter(shares_of_waiting(blocks_short()))) is WaitCause.KV_CACHE
    assert next(iter(shares_of_waiting(budget_short()))) is WaitCause.BUDGET


def test_shares_of_waiting_add_up_to_one(pressed: tuple[Records, Summary]) -> None:
    shares = shares_of_waiting(pressed[0])
    assert sum(shares.values()) == pytest.approx(1)
    assert list(shares.values()) == sorted(shares.values(), reverse=True)


def test_a_step_that_leaves_nothing_waiting_has_no_reason(pressed: tuple[Records, Summary]) -> None:
    replica = pressed[0].replicas[0]
    assert ((wait_causes(replica) == WaitCause.STEP) == (replica.steps.num_waiting == 0)).all()


def test_the_reason_of_a_slow_request_names_its_queue_prefill_preemption_and_length(
    pressed: tuple[Records, Summary],
) -> None:
    records = pressed[0]
    causes, table = Causes(records), records.requests
    said = {row: causes.why(row) for row in range(len(table))}
    for row, text in said.items():
        if table.num_preemptions[row] and "preempted" in text:
            assert f"{int(table.num_recomputed_tokens[row]):,} tokens recomputed" in text
        assert ("preempted" not in text) or table.num_preemptions[row] > 0
    assert any("preempted" in text and "without a token" in text for text in said.values())
    assert any("output tokens at" in text for text in said.values())


def test_a_request_that_waited_says_how_long_and_for_what() -> None:
    records, _ = seats_short()
    row = int(worst_requests(records, "ttft", 1)[0])
    queued = (records.requests.scheduled_ns - records.requests.arrival_ns)[row]
    assert Causes(records).why(row).startswith(f"queued {milliseconds(queued / MS)}: all max_num_seqs seats were taken")


def test_a_stall_is_not_counted_into_the_time_per_token() -> None:
    # three tokens 10 ms apart, a stall of 500 ms, two tokens 10 ms apart
    records = with_requests(
        token_records((0, [0, 1, 2, 52, 53])), num_preemptions=np.array([1]), num_recomputed_tokens=np.array([12])
    )
    said = Causes(records).why(0)
    assert said == "preempted once: 12 tokens recomputed, 500 ms without a token"
    slow = with_requests(
        token_records((0, [0, 1, 2, 3, 8, 9])), num_preemptions=np.array([1]), num_recomputed_tokens=np.array([12])
    )
    assert "6 output tokens at 10 ms each took 40 ms" in Causes(slow).why(0)


def test_rejected_unsent_and_unfinished_requests_have_a_reason_of_their_own() -> None:
    records = token_records((0, [0]), (0, [1]), (0, [2, 3]))
    records = with_requests(
        records,
        outcome=np.array([Outcome.REJECTED, UNFINISHED, UNFINISHED]),
        arrival_ns=np.array([0, -1, 0]),
        finish_ns=np.array([0, -1, -1]),
    )
    causes = Causes(records)
    assert causes.why(0) == "rejected on arrival"
    assert causes.why(1).startswith("never sent")
    assert causes.why(2).endswith("(unfinished at the end of the run)")


def test_worst_requests_are_the_slowest_and_unfinished_ones_count() -> None:
    records = token_records((0, [0]), (0, [9]), (0, [5]))
    assert worst_requests(records, "e2el", 2).tolist() == [1, 2]
    cut = with_requests(
        records,
        outcome=np.array([UNFINISHED, 0, 0]),
        finish_ns=np.array([-1, *records.requests.finish_ns[1:]]),
    )
    assert worst_requests(replace(cut, end_ns=S), "e2el", 1).tolist() == [0]


def test_the_answer_says_whether_it_keeps_up_and_what_was_short(pressed: tuple[Records, Summary]) -> None:
    stable = queue_at(0.4, 500, 1)
    assert answer(stable[0], summarize(*stable)).headline.startswith("Stable: it keeps up with")
    over = queue_at(1.4, 1500, 1)
    assert answer(over[0], summarize(*over)).headline.startswith("Overloaded:")
    burst = single_server(np.zeros(200, np.int64), np.full(200, 10 * MS))
    assert answer(burst[0], summarize(*burst)).headline == "One burst: 200 requests at once took 2.00 s."
    short = " ".join(answer(*seats_short()).sentences)
    assert "because all max_num_seqs seats were taken (2)" in short
    assert "No request was preempted." in short
    told = " ".join(answer(*pressed).sentences)
    stats = pressed[1].preemption
    assert f"{stats.num_preemptions} preemptions hit {stats.num_preempted_requests} requests" in told
    assert "1 of 2 objectives missed: ttft:p99<1ms" in told


# --- figures


def step_table(start: np.ndarray, end: np.ndarray) -> StepTable:
    state = {name: np.zeros(len(start), np.int64) for name in StepTable.__dataclass_fields__}
    return StepTable(**state | {"start_ns": start, "end_ns": end})


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 30), st.integers(0, 9)), min_size=1, max_size=25),
    st.integers(1, 12),
)
def test_intervals_keep_the_mean_over_time_and_the_extremes(parts: list[tuple[int, int, int]], num: int) -> None:
    gaps, lengths, values = (np.array(column, np.int64) for column in zip(*parts, strict=True))
    end = np.cumsum(gaps + lengths)
    start = end - lengths
    edges = np.linspace(0, int(end[-1]), num + 1)
    mean, low, high = _envelope(step_table(start, end), values.astype(float), edges)
    for k in range(num):
        fine = np.linspace(edges[k], edges[k + 1], 2001)
        middle = (fine[1:] + fine[:-1]) / 2
        inside = np.searchsorted(end, middle, "right")
        level = np.where(middle >= start[inside], values[inside], 0)
        assert mean[k] == pytest.approx(level.mean(), abs=0.02)
        assert low[k] <= level.min()
        assert high[k] >= level.max()
    assert high.max() == values.max()
    assert (mean * np.diff(edges)).sum() == pytest.approx((values * lengths).sum())


def test_few_steps_are_drawn_exactly_and_many_as_intervals_with_a_note() -> None:
    few, many = queue_at(0.8, MAX_RAW_STEPS, 1), queue_at(0.8, 5 * MAX_RAW_STEPS, 1)
    exact = next(figure for figure in figures(few[0], summarize(*few)) if figure.name == "queue")
    assert len(exact.data[0]["x"]) >= MAX_RAW_STEPS
    assert "intervals" not in exact.caption
    thinned = next(figure for figure in figures(many[0], summarize(*many)) if figure.name == "queue")
    assert all(len(trace["x"]) <= 2 * NUM_BUCKETS for trace in thinned.data)
    assert f"{5 * MAX_RAW_STEPS:,} steps are drawn as {NUM_BUCKETS} intervals" in thinned.caption


def test_every_preemption_is_marked(pressed: tuple[Records, Summary]) -> None:
    kv = next(figure for figure in figures(*pressed) if figure.name == "kv")
    marks = next(trace for trace in kv.data if trace["name"].startswith("preemptions"))
    assert sum(marks["customdata"]) == pressed[1].preemption.num_preemptions


def test_distributions_show_the_limits_of_the_objectives(pressed: tuple[Records, Summary]) -> None:
    ttft = next(figure for figure in figures(*pressed) if figure.name == "cdf-ttft")
    assert len(ttft.layout["shapes"]) == 1
    assert ttft.layout["annotations"][0]["text"].startswith("p99 <")
    assert ttft.data[0]["y"][-1] == 100


def test_axes_have_units(pressed: tuple[Records, Summary]) -> None:
    for figure in figures(*pressed):
        if figure.name not in ("preemptions",):
            both = figure.layout["xaxis"]["title"] + figure.layout["yaxis"]["title"]
            assert re.search(r"\((s|ms|min|h|%|% of usable)\)", both), figure.name


def test_the_time_axis_takes_the_unit_of_the_run() -> None:
    records = token_records((0, [0]))
    units = [time_axis(replace(records, end_ns=seconds * S)).unit for seconds in (60, 1200, 40_000)]
    assert units == ["s", "min", "h"]


def test_figures_of_an_empty_run_are_drawn_empty() -> None:
    records = replace(with_requests(token_records((0, [0])), outcome=np.array([UNFINISHED])), replicas=())
    for figure in figures(records, summarize(records, workload_of(records))):
        json.dumps(figure.for_page(), allow_nan=False)


# --- html


class Tags(HTMLParser):
    """Collects what a page refers to, and its tags."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.opened: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.opened.append(tag)
        given = dict(attrs)
        self.links += [given[name] or "" for name in ("src", "href", "data", "action") if name in given]
        self.ids += [given["id"] or ""] if "id" in given else []


def test_the_page_refers_to_nothing_outside_itself(page: str) -> None:
    tags = Tags()
    tags.feed(page)
    assert all(link.startswith("#") for link in tags.links)
    assert {link[1:] for link in tags.links} <= set(tags.ids)
    assert not {"link", "img", "iframe"} & set(tags.opened)
    assert "default-src 'none'" in page
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style


def test_the_page_holds_plotly_once_and_is_small(page: str) -> None:
    assert page.count("plotly.js v") == 1
    assert len(page.encode()) < 8_000_000


def test_text_from_outside_is_escaped(page: str) -> None:
    assert "a &lt;run&gt; &amp; its name" in page
    assert "watch &lt;out&gt;" in page
    assert "unit of time: &lt;ms&gt;" in page
    for raw in ("<run>", "<out>", "<ms>", "</script><b>"):
        assert raw not in page
    assert page.count("</script>") == 3


def test_labels_of_requests_are_escaped(pressed: tuple[Records, Summary], tmp_path: Path) -> None:
    labels = tuple(f"<img src=x{row}>" for row in range(len(pressed[0].requests)))
    write_html(tmp_path / "a.html", *pressed, replace(CONTEXT, labels=labels))
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "&lt;img src=x" in text
    assert "<img" not in text


def test_the_first_screen_gives_verdict_key_numbers_objectives_and_calibration(
    page: str, pressed: tuple[Records, Summary]
) -> None:
    top = page[: page.index("<nav")]
    for text in ("uncalibrated", "TTFT, median", "KV usage, peak", "Preemptions", "✗ missed", "✓ kept", "Verdict"):
        assert text in top
    assert pressed[1].stability.verdict.replace("_", " ") in top


def test_settings_are_shown_with_their_source(page: str) -> None:
    assert "default of vLLM 0.32" in page
    assert "max_num_seqs" in page


def test_every_figure_has_a_place_and_a_description(page: str, pressed: tuple[Records, Summary]) -> None:
    data = re.search(r'id="figures">(.*?)</script>', page)
    assert data is not None
    assert "<" not in data[1]
    drawn = json.loads(data[1])
    assert [figure["name"] for figure in drawn] == [figure.name for figure in figures(*pressed)]
    for figure in drawn:
        assert re.search(rf'id="plot-{figure["name"]}" role="img" tabindex="0" aria-label="[^"]+"', page)


def test_a_run_without_preemptions_or_finished_requests_still_makes_a_page(tmp_path: Path) -> None:
    records = with_requests(token_records((0, [0])), outcome=np.array([UNFINISHED]))
    for name, (made, load) in {"a": queue_at(0.4, 100, 1), "b": (records, workload_of(records))}.items():
        write_html(tmp_path / f"{name}.html", made, summarize(made, load), ReportContext())
        assert 'href="#preemptions"' not in (tmp_path / f"{name}.html").read_text(encoding="utf-8")


def test_the_same_run_gives_the_same_page(pressed: tuple[Records, Summary], page: str, tmp_path: Path) -> None:
    write_html(tmp_path / "again.html", *pressed, CONTEXT)
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == page


def test_a_long_run_stays_below_eight_megabytes(tmp_path: Path) -> None:
    records, load = queue_at(0.9, 60_000, 1)
    write_html(tmp_path / "long.html", records, summarize(records, load), CONTEXT)
    assert (tmp_path / "long.html").stat().st_size < 6_000_000


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser_every_figure_is_drawn_and_nothing_sticks_out(page: str, width: int, tmp_path: Path) -> None:
    probe = """<script>addEventListener("load", () => { dispatchEvent(new Event("beforeprint")); setTimeout(() => {
      const out = [...document.querySelectorAll("*")].filter((e) => e.getBoundingClientRect().right > innerWidth + 1);
      parent.postMessage({width: innerWidth, scroll: document.documentElement.scrollWidth,
        drawn: document.querySelectorAll(".plot .main-svg").length > 0 &&
          [...document.querySelectorAll(".plot")].every((e) => e.querySelector(".main-svg")),
        out: out.filter((e) => !e.closest(".skip")).map((e) => e.tagName + "." + e.className)}, "*"); }, 1500); });
      addEventListener("error", (e) => parent.postMessage({error: e.message}, "*"));</script></body>"""
    (tmp_path / "page.html").write_text(page.replace("</body>", probe), encoding="utf-8")
    (tmp_path / "frame.html").write_text(
        f'<body><iframe src="page.html" style="width:{width}px;height:3000px;border:0"></iframe><pre id="said"></pre>'
        '<script>addEventListener("message", (e) => said.append(JSON.stringify(e.data) + "\\n"))</script></body>'
    )
    done = subprocess.run(
        [
            "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
            "--disable-background-networking", f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=15000",
            "--allow-file-access-from-files", "--window-size=1400,3000", "--dump-dom",
            f"file://{tmp_path / 'frame.html'}",
        ],
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    said = re.search(r'<pre id="said">(.*?)</pre>', done.stdout, re.DOTALL)
    assert said is not None
    found: list[dict[str, Any]] = [json.loads(line) for line in said[1].replace("&gt;", ">").strip().splitlines()]
    assert found == [{"width": width, "scroll": found[0]["scroll"], "drawn": True, "out": []}]
    assert found[0]["scroll"] <= width


# --- files


def test_a_failed_write_leaves_neither_the_file_nor_a_piece_of_it(tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_text("old")
    with pytest.raises(TypeError), atomic_writer(tmp_path / "old.txt") as file:
        file.writelines(["half", 1])  # type: ignore[list-item]
    assert [path.name for path in tmp_path.iterdir()] == ["old.txt"]
    assert (tmp_path / "old.txt").read_text() == "old"


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(FileNotFoundError, match=r"cannot write .*nowhere/a\.html"),
        atomic_writer(tmp_path / "nowhere" / "a.html"),
    ):
        pass


def test_reports_import_neither_plotly_nor_pandas_nor_scipy() -> None:
    code = (
        "import sys, windtunnel.reports.html, windtunnel.reports.text, windtunnel.reports.perfetto\n"
        "print(sorted({'plotly', 'pandas', 'scipy', 'pyarrow', 'pydantic', 'simpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
