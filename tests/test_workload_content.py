"""What requests have in common, how a workload is written down and read again, and what is said about it."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from windtunnel.scenarios.workloads import (
    Fixed,
    Lognormal,
    Poisson,
    Prefixes,
    Sessions,
    TraceError,
    Uniform,
    describe,
    read_trace,
    scale_rate,
    shared_prompt_tokens,
    slice_time,
    synthetic_workload,
    truncate,
    write_workload,
)
from windtunnel.sim.workload import Workload, workload


def columns(made: Workload) -> dict[str, Any]:
    values = {field.name: getattr(made, field.name) for field in fields(made)}
    return {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in values.items()}


def tokens(made: Workload, row: int) -> list[tuple[int, int]]:
    """A name for each token of prompt and answer: (stream, position), or (-1 - row, position) for the request's own."""
    length = int(made.num_prompt_tokens[row] + made.num_output_tokens[row])
    named: list[tuple[int, int]] = []
    for stream, end in made.content[row] if made.content else ():
        named.extend((stream, position) for position in range(len(named), min(end, length)))
    return named + [(-1 - row, position) for position in range(len(named), length)]


def common(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> int:
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    return same


# Shared prefixes


def test_requests_of_one_group_begin_alike_and_others_do_not() -> None:
    made = synthetic_workload(60, 1, Uniform(5, 9), 3, seed=1, prefixes=Prefixes(4, Uniform(10, 20)))
    assert made.content is not None
    groups = [segments[0][0] for segments in made.content]
    assert sorted(set(groups)) == [0, 1, 2, 3]
    assert made.num_streams == 4
    for a in range(60):
        for b in range(a):
            same = common(tokens(made, a), tokens(made, b))
            assert same == (made.content[a][0][1] if groups[a] == groups[b] else 0)
    own = made.num_prompt_tokens - np.array([segments[0][1] for segments in made.content])
    assert own.min() >= 5
    assert own.max() <= 9


def test_a_share_of_the_requests_has_a_prefix() -> None:
    made = synthetic_workload(20_000, 1, 5, 3, seed=1, prefixes=Prefixes(4, 10, share=0.25))
    assert made.content is not None
    assert sum(map(bool, made.content)) / 20_000 == pytest.approx(0.25, abs=0.02)
    assert sorted(set(made.num_prompt_tokens.tolist())) == [5, 15]


def test_popular_prefixes_follow_zipf() -> None:
    made = synthetic_workload(100_000, 1, 5, 3, seed=1, prefixes=Prefixes(5, 10, "zipf", exponent=1.5))
    assert made.content is not None
    counts = np.bincount([segments[0][0] for segments in made.content])
    weights = np.arange(1.0, 6.0) ** -1.5
    assert counts / counts.sum() == pytest.approx(weights / weights.sum(), abs=0.01)


# Conversations


SESSION_SETTINGS = st.fixed_dictionaries(
    {
        "n": st.integers(1, 40),
        "turns": st.integers(1, 6),
        "prefix": st.integers(0, 30),
        "limit": st.none() | st.integers(150, 400),
        "seed": st.integers(0, 1000),
    }
)


@given(SESSION_SETTINGS)
def test_a_turn_repeats_all_that_was_said_before(chosen: dict[str, Any]) -> None:
    made = synthetic_workload(
        chosen["n"],
        Poisson(1),
        Uniform(1, 40),
        Uniform(1, 30),
        seed=chosen["seed"],
        prefixes=Prefixes(2, chosen["prefix"]) if chosen["prefix"] else None,
        sessions=Sessions(Uniform(1, chosen["turns"]), think=2.5, max_context_tokens=chosen["limit"]),
    )
    assert len(made) == chosen["n"]
    said = [tokens(made, row) for row in range(len(made))]
    for row, before in enumerate(made.previous.tolist()):
        prompt = int(made.num_prompt_tokens[row])
        if before >= 0:
            assert said[row][: len(said[before])] == said[before], "the prompt holds the conversation so far"
            assert prompt > len(said[before]), "and what the user adds"
            assert made.think_ns[row] == 2_500_000_000
            assert made.arrival_ns[row] == -1
        else:
            assert made.think_ns[row] == 0
            assert prompt > chosen["prefix"]
        if chosen["limit"] is not None:
            assert len(said[row]) <= chosen["limit"]
    for row, before in enumerate(made.previous.tolist()):
        for other in range(row):
            if before < 0:
                same = common(said[row], said[other])
                assert same in (0, chosen["prefix"]), "conversations share no more than the system prompt"


def test_a_number_of_conversations_has_all_their_turns() -> None:
    made = synthetic_workload(None, 1, 10, 5, seed=1, sessions=Sessions(turns=4, num_sessions=25))
    assert len(made) == 100
    assert int((made.previous < 0).sum()) == 25
    assert made.num_prompt_tokens[:4].tolist() == [10, 25, 40, 55]
    assert "25 conversations with 100 turns." in made.notes


def test_conversations_that_reach_the_context_end_and_are_counted() -> None:
    sessions = Sessions(turns=10, num_sessions=8, max_context_tokens=50)
    made = synthetic_workload(None, 1, 10, 5, seed=1, sessions=sessions)
    assert len(made) == 8 * 3
    assert any("8 conversations ended early" in note for note in made.notes)


def test_conversations_whose_first_turn_is_too_long_are_counted() -> None:
    sessions = Sessions(turns=1, num_sessions=1000, max_context_tokens=100)
    made = synthetic_workload(None, 1, Uniform(1, 190), 10, seed=1, sessions=sessions)
    assert any(f"{1000 - len(made)} conversations left out" in note for note in made.notes)
    assert 0 < len(made) < 1000


def test_later_batches_of_conversations_draw_anew() -> None:
    """Refusals make a second batch of draws necessary; it must not repeat the first."""
    sessions = Sessions(turns=1, max_context_tokens=100)
    prefixes = Prefixes(50, 1)
    made = synthetic_workload(400, 1, Uniform(1, 190), 9, seed=1, prefixes=prefixes, sessions=sessions)
    assert len(made) == 400
    drawn = list(zip(made.num_prompt_tokens.tolist(), [s[0][0] for s in made.content or ()], strict=True))
    first, second = drawn[:180], drawn[220:]
    assert first != second[:180]
    assert len({tuple(drawn[i : i + 3]) for i in range(398)}) == 398


# What is said about a workload


@st.composite
def workloads(draw: st.DrawFn, min_size: int = 1) -> Workload:
    """Any workload that the contract allows: a tree of streams, requests that follow others, names, a limit."""
    n = draw(st.integers(min_size, 12))
    previous = [draw(st.integers(-1, row - 1)) if draw(st.booleans()) else -1 for row in range(n)]
    due = sorted(draw(st.lists(st.integers(0, 10**15), min_size=n, max_size=n)))
    output = draw(st.lists(st.integers(1, 50), min_size=n, max_size=n))
    parents = draw(st.lists(st.integers(-1, 5), max_size=6))
    parents = [min(parent, stream - 1) for stream, parent in enumerate(parents)]
    starts = [0] * len(parents)
    for stream, parent in enumerate(parents):
        starts[stream] = 0 if parent < 0 else starts[parent] + draw(st.integers(1, 9))

    def path(stream: int) -> list[tuple[int, int]]:
        end = starts[stream] + draw(st.integers(1, 9))
        chain = [(stream, end)]
        while parents[stream] >= 0:
            chain.append((parents[stream], starts[stream]))
            stream = parents[stream]
        return chain[::-1]

    content = None
    if parents:
        content = tuple(
            tuple(path(draw(st.integers(0, len(parents) - 1)))) if draw(st.booleans()) else () for _ in range(n)
        )
    return workload(
        [at if before < 0 else -1 for at, before in zip(due, previous, strict=True)],
        draw(st.lists(st.integers(1, 60), min_size=n, max_size=n)),
        output,
        max_tokens=[tokens + draw(st.integers(0, 3)) for tokens in output],
        priority=draw(st.lists(st.integers(-3, 3), min_size=n, max_size=n)),
        previous=previous,
        think_ns=[0 if before < 0 else draw(st.integers(0, 10**11)) for before in previous],
        content=content,
        num_streams=len(parents),
        labels=draw(st.none() | st.lists(st.text(max_size=5), min_size=n, max_size=n).map(tuple)),
        max_concurrency=draw(st.none() | st.integers(1, 9)),
        source=draw(st.text(max_size=8)),
        notes=tuple(draw(st.lists(st.text(max_size=8), max_size=3))),
    )


@given(workloads())
def test_shared_tokens_are_those_that_an_earlier_request_has(made: Workload) -> None:
    said = [tokens(made, row) for row in range(len(made))]
    prompts = made.num_prompt_tokens.tolist()
    wide = replace(made, num_output_tokens=made.num_output_tokens + 200, max_tokens=made.max_tokens + 200)
    said = [tokens(wide, row) for row in range(len(made))]
    expected = [
        min(prompts[row], max((common(said[row], said[other]) for other in range(row)), default=0))
        for row in range(len(made))
    ]
    assert shared_prompt_tokens(made).tolist() == expected


def test_a_description_counts_what_is_there() -> None:
    made = workload([0, 10**9, 3 * 10**9], [10, 20, 60], [1, 2, 3], content=(((0, 8),), ((0, 5),), ()), num_streams=1)
    told = describe(made)
    assert told["num_requests"] == 3
    assert told["num_conversations"] is None
    assert told["duration_s"] == 3.0
    assert told["request_rate_per_s"] == pytest.approx(2 / 3)
    assert told["burstiness_cv"] == pytest.approx(0.5 / 1.5)
    assert told["prompt_tokens"]["mean"] == 30
    assert told["prompt_tokens"]["p50"] == 20
    assert told["prompt_tokens"]["total"] == 90
    assert told["output_tokens"]["max"] == 3
    assert told["shared_prompt_tokens"] == 5
    assert told["shared_prompt_token_share"] == pytest.approx(5 / 90)


def test_a_description_of_requests_at_once_has_no_rate() -> None:
    told = describe(workload([0, 0], [1, 1], [1, 1]))
    assert told["request_rate_per_s"] is None
    assert told["burstiness_cv"] is None
    assert describe(workload([], [], []))["num_requests"] == 0


@given(workloads())
def test_a_description_is_plain_json(made: Workload) -> None:
    assert json.loads(json.dumps(describe(made)))["num_requests"] == len(made)


def test_the_rate_and_burstiness_of_drawn_requests_are_found_again() -> None:
    told = describe(synthetic_workload(50_000, Poisson(8), Lognormal(512, 0.8), Fixed(9), seed=1))
    assert told["request_rate_per_s"] == pytest.approx(8, rel=0.03)
    assert told["burstiness_cv"] == pytest.approx(1, rel=0.03)
    assert told["prompt_tokens"]["mean"] == pytest.approx(512, rel=0.03)


# Written down and read again


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl"])
@given(made=workloads())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_workload_is_read_as_it_was_written(tmp_path: Path, name: str, made: Workload) -> None:
    write_workload(made, tmp_path / name)
    assert columns(read_trace(tmp_path / name)) == columns(made)


def test_names_with_line_ends_quotes_and_commas_are_kept(tmp_path: Path) -> None:
    names = ("a\rb", "\n", '"', ",", " ", "", "\u2028")
    write_workload(workload([0] * 7, [1] * 7, [1] * 7, previous=[-1] * 6 + [0], labels=names), tmp_path / "t.csv")
    assert read_trace(tmp_path / "t.csv").labels == names


@pytest.mark.parametrize("format_name", ["csv", "jsonl"])
def test_a_drawn_workload_is_read_as_it_was_written(tmp_path: Path, format_name: Any) -> None:
    made = synthetic_workload(
        300, 3, Lognormal(90, 1), Uniform(1, 9), seed=5, prefixes=Prefixes(3, 40), sessions=Sessions(3, 1.0)
    )
    write_workload(made, tmp_path / "t", format=format_name)
    assert columns(read_trace(tmp_path / "t")) == columns(made)


def test_neutral_columns_are_not_written(tmp_path: Path) -> None:
    write_workload(workload([0, 5], [1, 2], [3, 4]), tmp_path / "t.csv")
    lines = (tmp_path / "t.csv").read_text().splitlines()
    assert lines[1:] == ["arrival_ns,num_prompt_tokens,num_output_tokens", "0,1,3", "5,2,4"]


def test_an_unknown_format_and_an_unwritable_place_are_refused(tmp_path: Path) -> None:
    made = workload([0], [1], [1])
    with pytest.raises(ValueError, match="format must be"):
        write_workload(made, tmp_path / "t", format="xml")  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        write_workload(made, tmp_path / "nowhere" / "t.csv")


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        ("# windtunnel-workload {", "damaged"),
        ('# windtunnel-workload {"version": 1}', "damaged"),
        (
            '# windtunnel-workload {"version": 9, "source": "", "notes": [], "max_concurrency": 1, "num_streams": 0}',
            "version 9",
        ),
        ('{"windtunnel_workload": 5}', "damaged"),
    ],
)
def test_a_damaged_first_line_is_named(tmp_path: Path, first: str, reason: str) -> None:
    path = tmp_path / "t"
    path.write_text(f"{first}\narrival_ns,num_prompt_tokens,num_output_tokens\n0,1,1\n")
    with pytest.raises(TraceError, match=reason) as caught:
        read_trace(path)
    assert caught.value.line == 1


def test_a_negative_arrival_in_a_written_workload_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    write_workload(workload([0, 5], [1, 2], [3, 4]), path)
    path.write_text(path.read_text().replace("\n0,1,3", "\n-7,1,3"))
    with pytest.raises(TraceError, match="the arrival is negative") as caught:
        read_trace(path)
    assert caught.value.line == 3


# Cutting and scaling keep what belongs together


@given(workloads(), st.floats(0, 1e6), st.floats(1, 1e6), st.integers(1, 12), st.floats(0.1, 10))
def test_cut_and_scaled_workloads_keep_conversations_whole(
    made: Workload, start_s: float, duration_s: float, limit: int, factor: float
) -> None:
    named = replace(made, labels=tuple(map(str, range(len(made)))))
    cut = scale_rate(truncate(slice_time(named, start_s, duration_s), limit), factor)
    assert cut.labels is not None
    rows = list(map(int, cut.labels))
    assert rows == sorted(rows)
    for row, before in zip(rows, cut.previous.tolist(), strict=True):
        assert made.previous[row] == (-1 if before < 0 else rows[before])
        assert (cut.arrival_ns[rows.index(row)] == -1) == (before >= 0)
    assert cut.num_prompt_tokens.tolist() == made.num_prompt_tokens[rows].tolist()
    assert cut.think_ns.tolist() == made.think_ns[rows].tolist()
    if made.content is not None:
        assert cut.content == tuple(made.content[row] for row in rows)
