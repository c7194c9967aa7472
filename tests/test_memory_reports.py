"""What windtunnel memory says first, and its Markdown, CSV and Parquet."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import windtunnel as wt
from windtunnel.cli.main import main
from windtunnel.memory import MemoryReport, MemorySweep, memory_plan, memory_sweep
from windtunnel.reports.memory_first_screen import plan_cards, sweep_cards

PLAN = ["memory", "--model", "llama-3.1-8b", "--gpu", "h100", "--max-model-len", "8k"]


@pytest.fixture(scope="module")
def plan() -> MemoryReport:
    return memory_plan("llama-3.1-8b", "h100", max_model_len=8192, gpu_price=2.5)


@pytest.fixture(scope="module")
def sweep() -> MemorySweep:
    prices = {"h100-sxm": 2.5, "l40s": 0.8}
    return memory_sweep(
        "llama-3.1-8b", "h100-sxm,l40s,t4", tensor_parallel_size="1,2", dtype="bfloat16", gpu_price=prices
    )


def row_of(page: str, name: str) -> str:
    found = re.search(
        rf'<span class="name">{name}</span><span class="value">([^<]*)</span><span class="more">([^<]*)<', page
    )
    assert found is not None, name
    return " | ".join(found.groups())


# --- the first screen


def test_answer_cost_and_risk_stand_first(plan: MemoryReport, tmp_path: Path) -> None:
    plan.report(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    low, high = plan.judged.plan.interval_90
    assert row_of(page, "KV cache") == f"{plan.kv_cache_tokens:,} | tokens; {low:,} to {high:,} in nine starts of ten"
    assert row_of(page, "Requests at once") == f"{plan.max_concurrency:,.1f} | of 8,192 tokens each (max_model_len)"
    each = 2.5 / plan.max_concurrency
    assert row_of(page, "Cost").startswith("1 x H100-SXM | 2.5 USD per hour, 0.0")
    assert f"{each:.3g}"[:5] in row_of(page, "Cost")
    assert row_of(page, "Risk").startswith("ok | ")
    assert page.index('class="cards"') < page.index('id="memory"')


def test_without_a_price_that_is_said(tmp_path: Path) -> None:
    made = memory_plan("llama-3.1-8b", "h100", max_model_len=8192)
    cards = {card.name: card for card in plan_cards(made.row)}
    assert cards["Cost"].more == "no price was given (--gpu-price)"
    assert "cost_per_hour" not in made.to_dict()
    assert "USD" not in made.text()


def test_what_does_not_start_has_no_pool_to_show() -> None:
    made = memory_plan("llama-3.3-70b", "h100", gpu_price=2.5)
    cards = {card.name: card for card in plan_cards(made.row, made.cost)}
    assert cards["KV cache"].value == "–"
    assert cards["Risk"].value == "does not start"
    assert cards["Cost"].more == "2.5 USD per hour"


def test_users_are_counted_instead_of_longest_requests() -> None:
    made = memory_plan("llama-3.1-8b", "h100", max_model_len=8192, mean_tokens=2000)
    cards = {card.name: card for card in plan_cards(made.row)}
    assert made.users is not None
    assert cards["Requests at once"].value == f"{made.users.running:,}"
    assert cards["Requests at once"].more == "of 2,000 tokens each"


def test_a_sweep_says_what_is_largest_cheapest_and_tightest(sweep: MemorySweep) -> None:
    points = [point.to_dict() for point in sweep.points]
    cards = {card.name: card for card in sweep_cards(sweep.axes, points, sweep.currency)}
    ok = [point for point in points if point["verdict"] == "ok"]
    assert cards["Most KV tokens"].value == f"{max(point['kv_cache_tokens'] for point in ok):,}"
    assert cards["Cheapest that is ok"].value == f"{min(point['cost_per_hour'] for point in ok):g} USD per hour"
    assert cards["Plans"].value == f"{len(ok)} ok"
    unpriced = {card.name: card for card in sweep_cards(sweep.axes, [{**p, "cost_per_hour": None} for p in points])}
    assert unpriced["Fewest GPUs that are ok"].value == "1 GPU"


def test_prices_go_by_the_gpu_of_each_plan(sweep: MemorySweep) -> None:
    costs = {(point.values["gpu"], point.values["tensor_parallel_size"]): point.to_dict() for point in sweep.points}
    assert costs["h100-sxm", 2]["cost_per_hour"] == 5.0
    assert costs["l40s", 1]["cost_per_hour"] == 0.8
    assert costs["t4", 1].get("cost_per_hour") is None, "the table has no price for it, or it does not start"


@pytest.mark.parametrize("price", ["cheap", -1, {"gpu9000": 1.0}, True, ["1", "l40s=2"]])
def test_a_price_that_cannot_be_meant_is_refused(price: Any) -> None:
    with pytest.raises(ValueError, match=r"gpu_price|unknown GPU"):
        memory_plan("llama-3.1-8b", "h100", gpu_price=price)


# --- Markdown, CSV, Parquet


def test_markdown_has_answer_cost_risk_and_the_command(plan: MemoryReport) -> None:
    text = plan.markdown(command="windtunnel memory --model x")
    assert text.startswith("### meta-llama/Llama-3.1-8B-Instruct on 1 x H100-SXM")
    assert f"| KV cache | {plan.kv_cache_tokens:,} |" in text
    assert "| Cost | 1 x H100-SXM | 2.5 USD per hour" in text
    assert plan.serve_command in text
    assert f"Planned with windtunnel {wt.__version__}: `windtunnel memory --model x`" in text
    assert all(line.count("|") == 4 for line in text.splitlines() if line.startswith("| KV cache |"))


def test_markdown_of_a_sweep_has_a_line_a_plan(sweep: MemorySweep) -> None:
    text = sweep.markdown()
    lines = [line for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    assert len(lines) == len(sweep.points) == 6
    assert "| cost per hour |" in text
    assert "5 USD" in lines[1]
    assert sweep.text().splitlines()[0].endswith("cost per hour")
    assert sweep.text().splitlines()[2].endswith("5 USD")


def test_files_hold_a_row_a_plan(sweep: MemorySweep, plan: MemoryReport, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    sweep.to_csv(tmp_path / "a.csv")
    sweep.to_parquet(tmp_path / "a.parquet")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "a.csv").read_text(encoding="utf-8"))))
    table = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert len(rows) == len(table) == 6
    assert [row["verdict"] for row in rows] == [row["verdict"] for row in table] == [p.verdict for p in sweep.points]
    for row, point in zip(rows, sweep.points, strict=True):
        if point.report is not None:
            assert int(row["kv_cache_tokens"]) == point.report.kv_cache_tokens
            assert int(row["kv_cache_tokens_low"]) == point.report.judged.plan.interval_90.low
    plan.to_csv(tmp_path / "b.csv")
    one = list(csv.DictReader(io.StringIO((tmp_path / "b.csv").read_text(encoding="utf-8"))))
    assert [row["max_model_len"] for row in one] == ["8192"]


def test_settings_of_numbers_and_words_are_a_column_of_words(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    made = memory_sweep("llama-3.1-8b", "l4", kv_cache_dtype="auto,fp8", gpu_memory_utilization="0.9,0.95")
    made.to_parquet(tmp_path / "a.parquet")
    assert pq.read_table(tmp_path / "a.parquet").column("kv_cache_dtype").to_pylist() == ["auto", "auto", "fp8", "fp8"]


# --- the command


def test_the_command_writes_all_forms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = {flag: tmp_path / f"a.{flag}" for flag in ("html", "csv", "parquet")}
    asked = [word for flag, path in paths.items() for word in (f"--{flag}", str(path))]
    assert main([*PLAN, "--gpu-price", "h100=2.5", "--currency", "EUR", "--markdown", *asked]) == 0
    out, told = capsys.readouterr()
    assert "2.5 EUR per hour" in out
    assert all(path.stat().st_size > 0 and f"wrote {path}" in told for path in paths.values())
    assert "windtunnel memory --model llama-3.1-8b" in paths["html"].read_text(encoding="utf-8")


def test_the_command_that_is_told_makes_the_same_plan(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*PLAN, "--no-enable-prefix-caching", "--enforce-eager", "--gpu-price", "2", "--mean-tokens", "3000"]
    assert main([*asked, "--markdown"]) == 0
    told = re.search(r"windtunnel [\d.]+: `windtunnel (.*)`", capsys.readouterr().out)
    assert told is not None
    assert main([*asked, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert main([*shlex.split(told[1]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == first


def test_two_outputs_in_one_place_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = str(tmp_path / "x")
    assert main([*PLAN, "--html", place, "--csv", place]) == 2
    assert "--html and --csv both name" in capsys.readouterr().err
    assert main([*PLAN, "--json", "--markdown"]) == 2
