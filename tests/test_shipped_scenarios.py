"""The scenarios that come with windtunnel: complete, runnable, and as docs/experiments.md says."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import REPO_ROOT

import windtunnel as wt
from windtunnel.scenarios.load import Override, bundled_scenarios, load_scenario
from windtunnel.scenarios.resolve import read_workload, resolve
from windtunnel.scenarios.schema import Scenario, SyntheticWorkload
from windtunnel.scenarios.workloads import Exponential, InTurn, lengths_from

NAMES = list(bundled_scenarios())
EXPERIMENTS = REPO_ROOT / "docs" / "experiments.md"
UNITS = {"ms": "ms", "throughput": "/s", "goodput": "/s", "duration": "s"}
TOKEN_METRICS = ("output_throughput", "total_token_throughput")


class Variant(NamedTuple):
    """One run of a comparison: what it is called in the table, and what makes it differ."""

    labels: tuple[str, ...]
    overrides: dict[str, Any]


def scenario_of(name: str) -> Scenario:
    return load_scenario(name).scenario


def variants(name: str) -> list[Variant]:
    """All runs of a scenario's comparison, by place on the axis and there by variant; one run without a comparison."""
    compare = scenario_of(name).compare
    named = compare.variants or {"": {}}
    places: list[dict[str, Any]] = [{compare.axis: value} for value in compare.values] if compare.axis else [{}]
    return [
        Variant(tuple(filter(None, (*map(written, place.values()), label))), {**own, **place})
        for place in places
        for label, own in named.items()
    ]


def written(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def header(name: str) -> list[str]:
    compare = scenario_of(name).compare
    places = [*([f"`{compare.axis}`"] if compare.axis else []), *(["variant"] if compare.variants else [])]
    return [*places, *map(column, compare.metrics)]


def column(metric: str) -> str:
    """``p99_ttft_ms`` as ``P99 TTFT (ms)``."""
    words = metric.removesuffix("_ms").replace("_", " ")
    words = re.sub(r"\b(ttft|tpot|itl|e2el|p\d+)\b", lambda found: found[0].upper(), words)
    unit = next((unit for end, unit in UNITS.items() if metric.endswith(end)), "")
    unit = "tokens/s" if metric in TOKEN_METRICS else "requests/s" if unit == "/s" else unit
    return f"{words} ({unit})" if unit else words


def row(name: str, run: Variant) -> list[str]:
    """The run's line in the table, from a simulation of it."""
    metrics = scenario_of(name).compare.metrics
    overrides: dict[str, Any] = {"saturation": "utilisation" in metrics, **run.overrides}
    summary = wt.simulate(name, **overrides).summary
    return [*run.labels, *(shown(metric, summary[metric]) for metric in metrics)]


def shown(metric: str, value: float | None) -> str:
    if value is None:
        return "-"
    if metric.endswith("_rate"):
        return f"{100 * value:.1f} %"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def table_of(name: str) -> list[list[str]]:
    """The table of a scenario in docs/experiments.md: the header, the ruler and the rows."""
    text = EXPERIMENTS.read_text()
    found = re.search(rf"^windtunnel \w+ {re.escape(name)}\b.*?```\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/experiments.md shows no command for {name}"
    lines = found[1].partition("|")[2].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("name", NAMES)
def test_a_scenario_is_called_like_its_file_and_says_what_it_teaches(name: str) -> None:
    scenario = scenario_of(name)
    assert scenario.name == name
    assert re.fullmatch(r".*[^.\s]", scenario.description), "one line, not a sentence"
    assert 2 <= len(re.findall(r"[.?!](?= [A-Z\d]|$)", scenario.teaches)) <= 6
    assert "\n" not in scenario.teaches


@pytest.mark.parametrize("name", NAMES)
def test_a_scenario_compares_settings_that_can_be_resolved(name: str) -> None:
    """As far as to the requests and the memory plan, which is where contradictions show."""
    compare = scenario_of(name).compare
    assert len(variants(name)) >= 2
    assert compare.metrics
    for run in {"first": variants(name)[0], "last": variants(name)[-1]}.values():
        resolve(load_scenario(name, {key: Override(value, key) for key, value in run.overrides.items()}))


@pytest.mark.parametrize("name", NAMES)
def test_every_scenario_has_a_table_with_all_its_runs(name: str) -> None:
    table = table_of(name)
    assert table[0] == header(name)
    num_labels = len(variants(name)[0].labels)
    assert [tuple(cells[:num_labels]) for cells in table[2:]] == [run.labels for run in variants(name)]


def checked(name: str) -> list[int]:
    """Rows that are computed again: the first, one in the middle and the last."""
    last = len(variants(name)) - 1
    return sorted({0, last // 2, last})


@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_of_the_experiments_come_out(name: str) -> None:
    """If they do not and need not: put the new ones there, and look whether what the scenario teaches still holds."""
    runs, table = variants(name), table_of(name)[2:]
    assert [row(name, runs[place]) for place in checked(name)] == [table[place] for place in checked(name)]


@pytest.mark.slow
def test_the_comparison_of_two_gpus_draws_its_conclusions_from_steady_states() -> None:
    verdicts = [wt.simulate("two-gpus", **run.overrides).summary["stability"] for run in variants("two-gpus")[-3:]]
    assert verdicts == ["stable"] * 3


def test_every_experiment_is_a_scenario_that_exists() -> None:
    assert set(re.findall(r"^windtunnel compare ([\w-]+)", EXPERIMENTS.read_text(), re.MULTILINE)) == set(NAMES)


# --- what the scenarios claim of their workloads


def test_the_lengths_of_the_spread_have_one_mean() -> None:
    rng = np.random.default_rng(3)
    for value in scenario_of("output-spread").compare.values:
        lengths = lengths_from(value).sample(rng, 1_000_000)
        assert lengths.mean() == pytest.approx(256, rel=0.01), value


def test_the_naive_variant_runs_everybody_to_the_longest_of_all_answers() -> None:
    scenario = scenario_of("opt-13b-23x")
    drawn = read_workload(load_scenario("opt-13b-23x")).num_output_tokens
    assert scenario.compare.variants["static of 4, all to the longest"]["output"] == drawn.max()
    assert drawn.max() == pytest.approx(128 * (np.log(1000) + np.euler_gamma), rel=0.005), "what is to be expected"


def test_the_conversations_say_as_much_as_they_are_said_to() -> None:
    said = read_workload(load_scenario("shared-prefix-thrash"))
    whole = (said.num_prompt_tokens + said.num_output_tokens).reshape(32, 10)[:, -1]
    assert whole.sum() == 93_120


def test_the_old_names_are_still_there() -> None:
    assert {"chat-8b-h100", "closed-loop-7b-b200", "preemption-storm"} <= set(NAMES)
    workload = scenario_of("chat-8b-h100").workload
    assert isinstance(workload, SyntheticWorkload)
    assert (workload.num_requests, workload.request_rate) == (5000, 10)


# --- lengths that only these scenarios need


def test_lengths_in_turn_begin_again_from_the_first() -> None:
    lengths = lengths_from({"dist": "in_turn", "values": [20, 20, 600]})
    assert lengths == InTurn((20, 20, 600))
    assert lengths.sample(np.random.default_rng(0), 7).tolist() == [20, 20, 600, 20, 20, 600, 20]
    assert lengths.sample(np.random.default_rng(0), 2).tolist() == [20, 20]


@pytest.mark.parametrize(("values", "message"), [([], "at least one"), ([1, 0], "at least 1"), ([1.5], "whole")])
def test_lengths_in_turn_must_be_lengths(values: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lengths_from({"dist": "in_turn", "values": values})


@pytest.mark.parametrize("most", [1, 32, 128, 512])
def test_what_is_drawn_again_is_what_rejection_would_leave(most: int) -> None:
    drawn = Exponential(128, maximum=most, redraw=True).sample(np.random.default_rng(1), 100_000)
    tried = np.rint(np.random.default_rng(2).exponential(128, 12_000_000 // most))
    kept = np.maximum(tried[tried <= most], 1)
    assert drawn.max() == most
    assert drawn.mean() == pytest.approx(kept.mean(), rel=0.03)
    assert drawn.std() == pytest.approx(kept.std(), rel=0.03, abs=1e-9)


def test_drawing_again_needs_a_limit() -> None:
    with pytest.raises(ValueError, match="redraw needs max"):
        Exponential(128, redraw=True)
    assert lengths_from("exponential:mean=9,max=20,redraw=true") == Exponential(9, maximum=20, redraw=True)
