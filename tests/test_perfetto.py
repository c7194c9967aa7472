"""The trace: valid events, slices that nest, counters that equal the records, and a part of a long run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from built_records import UNFINISHED, AffineStepCost, S, pressed_engine, queue_at, token_records, with_requests

from windtunnel.reports.context import ReportContext
from windtunnel.reports.perfetto import REQUESTS_PID_OFFSET, write_trace
from windtunnel.sim.records import Outcome, PreemptionTable, Records
from windtunnel.sim.simulate import run

Event = dict[str, Any]


@pytest.fixture(scope="module")
def pressed() -> Records:
    load, config = pressed_engine()
    return run(load, config, AffineStepCost())


def events_of(records: Records, folder: Path, **options: Any) -> list[Event]:
    write_trace(folder / "trace.json", records, **options)
    events: list[Event] = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return events


def of_kind(events: list[Event], ph: str) -> list[Event]:
    return [event for event in events if event["ph"] == ph]


def test_every_event_has_what_its_kind_needs(pressed: Records, tmp_path: Path) -> None:
    for event in events_of(pressed, tmp_path):
        assert event["ph"] in {"M", "X", "C", "i", "b", "e"}
        assert isinstance(event["name"], str)
        assert event["pid"] >= 1
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] in "be":
            assert {"id", "cat"} <= event.keys()


def test_steps_are_slices_with_their_batch_and_do_not_overlap(pressed: Records, tmp_path: Path) -> None:
    slices, steps = of_kind(events_of(pressed, tmp_path), "X"), pressed.replicas[0].steps
    assert [event["args"]["tokens"] for event in slices] == (steps.num_decode_seqs + steps.prefill_tokens).tolist()
    assert [round(event["ts"] * 1000) for event in slices] == steps.start_ns.tolist()
    ends = [event["ts"] + event["dur"] for event in slices]
    assert all(end <= event["ts"] + 1e-6 for end, event in zip(ends, slices[1:], strict=False))
    kinds = {(event["args"]["decode_seqs"] > 0, event["args"]["prefill_seqs"] > 0, event["name"]) for event in slices}
    assert kinds <= {(True, False, "decode"), (False, True, "prefill"), (True, True, "mixed")}


def test_slices_of_a_request_nest_and_fill_it(pressed: Records, tmp_path: Path) -> None:
    by_request: dict[int, list[Event]] = {}
    for event in events_of(pressed, tmp_path):
        if event["ph"] in "be":
            by_request.setdefault(event["id"], []).append(event)
    assert len(by_request) == len(pressed.requests)
    for row, own in by_request.items():
        open_slices: list[Event] = []
        for event in own:
            if event["ph"] == "b":
                open_slices.append(event)
            else:
                began = open_slices.pop()
                assert began["name"] == event["name"]
                assert began["ts"] <= event["ts"]
        assert not open_slices
        assert [event["ts"] for event in own] == sorted(event["ts"] for event in own)
        inner = own[1:-1]
        assert (inner[0]["ts"], inner[-1]["ts"]) == (own[0]["ts"], own[-1]["ts"])
        assert all(end["ts"] == begin["ts"] for end, begin in zip(inner[1::2], inner[2::2], strict=False))
        assert own[-1]["ts"] * 1000 == pytest.approx(int(pressed.requests.finish_ns[row]))


def test_a_preempted_request_shows_what_it_lost(pressed: Records, tmp_path: Path) -> None:
    events = events_of(pressed, tmp_path)
    marks, table = of_kind(events, "i"), pressed.replicas[0].preemptions
    assert [mark["args"]["tokens_lost"] for mark in marks] == table.num_computed_tokens.tolist()
    stalled = {event["id"] for event in events if event["ph"] == "b" and event["name"] == "preempted"}
    assert stalled == set(np.flatnonzero(pressed.requests.num_preemptions).tolist())


def test_the_phases_of_a_request_lie_where_the_records_say(tmp_path: Path) -> None:
    records = token_records((0, [2, 3]), (0, [4]))
    begins = [event for event in events_of(records, tmp_path) if event["ph"] == "b" and event["id"] == 0]
    assert [(event["name"], event["ts"]) for event in begins] == [
        ("request #0", 0),
        ("queued", 0),
        ("prefill", 20_000),
        ("decode", 30_000),
    ]


def phases_of(records: Records, folder: Path) -> list[tuple[str, float, float]]:
    """The phases of the only request; inside it nothing else is open, so begins and ends alternate."""
    inner = [event for event in events_of(records, folder) if event["ph"] in "be"][1:-1]
    return [(begin["name"], begin["ts"], end["ts"]) for begin, end in zip(inner[::2], inner[1::2], strict=True)]


def preempted_at(records: Records, *times_ns: int) -> Records:
    """The same run in which request 0 was preempted at these times."""
    num = len(times_ns)
    table = PreemptionTable(np.array(times_ns), *(np.zeros(num, np.int64) for _ in range(6)))
    replica = replace(records.replicas[0], preemptions=table)
    return replace(with_requests(records, num_preemptions=np.array([num])), replicas=(replica,))


def test_a_request_with_one_token_has_no_decode(tmp_path: Path) -> None:
    assert phases_of(token_records((0, [2])), tmp_path) == [("queued", 0, 20_000), ("prefill", 20_000, 30_000)]


def test_preemptions_before_the_next_token_are_one_stall(tmp_path: Path) -> None:
    records = preempted_at(token_records((0, [0, 1, 9, 10])), 20_000_000, 50_000_000)
    assert phases_of(records, tmp_path) == [
        ("prefill", 0, 10_000),
        ("decode", 10_000, 20_000),
        ("preempted", 20_000, 100_000),
        ("decode", 100_000, 110_000),
    ]


def test_a_preemption_during_prefill_lasts_until_the_first_token(tmp_path: Path) -> None:
    records = preempted_at(token_records((0, [0])), 4_000_000)
    assert phases_of(records, tmp_path) == [("prefill", 0, 4_000), ("preempted", 4_000, 10_000)]


def test_counters_follow_the_steps_and_fall_to_zero_when_idle(tmp_path: Path) -> None:
    records, _ = queue_at(0.3, 50, 1)
    running = [event for event in of_kind(events_of(records, tmp_path), "C") if event["name"] == "running"]
    steps = records.replicas[0].steps
    num_idle = int((steps.start_ns[1:] > steps.end_ns[:-1]).sum()) + 1
    assert len(running) == len(steps) + num_idle
    assert sum(event["args"]["requests"] == 0 for event in running) == num_idle


def test_a_part_of_a_run_and_a_limit_leave_the_rest_out_and_say_so(pressed: Records, tmp_path: Path) -> None:
    stats = write_trace(tmp_path / "a.json", pressed, start_s=1.0, end_s=2.0)
    slices = of_kind(json.loads((tmp_path / "a.json").read_text())["traceEvents"], "X")
    assert all(event["ts"] < 2e6 and event["ts"] + event["dur"] > 1e6 for event in slices)
    assert stats.num_steps == len(slices)
    assert stats.num_steps + stats.num_steps_left_out == len(pressed.replicas[0].steps)
    limited = write_trace(tmp_path / "b.json", pressed, limit=7)
    assert (limited.num_steps, limited.num_requests) == (7, 7)
    assert limited.num_requests_left_out == len(pressed.requests) - 7


@pytest.mark.parametrize(("options", "message"), [({"end_s": 0}, "is empty"), ({"limit": 0}, "at least 1, got 0")])
def test_an_empty_part_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        write_trace(tmp_path / "a.json", queue_at(0.3, 5, 1)[0], **options)
    assert list(tmp_path.iterdir()) == []


def test_no_nanosecond_is_lost(tmp_path: Path) -> None:
    records = token_records((0, [0]), step_ns=1_000_001)
    write_trace(tmp_path / "trace.json", records)
    assert '"dur":1000.001' in (tmp_path / "trace.json").read_text()


def test_unfinished_rejected_and_unsent_requests_are_drawn_as_far_as_they_came(tmp_path: Path) -> None:
    records = token_records((0, [0]), (0, [1]), (0, [2]), (0, [3]))
    records = with_requests(
        records,
        outcome=np.array([Outcome.REJECTED, UNFINISHED, UNFINISHED, UNFINISHED]),
        arrival_ns=np.array([0, 0, 0, -1]),
        scheduled_ns=np.array([-1, -1, S // 100, -1]),
        first_token_ns=np.full(4, -1),
        finish_ns=np.array([0, -1, -1, -1]),
    )
    begins = [(event["id"], event["name"]) for event in of_kind(events_of(records, tmp_path), "b")]
    assert begins == [
        (0, "request #0"),
        (1, "request #1"),
        (1, "queued"),
        (2, "request #2"),
        (2, "queued"),
        (2, "prefill"),
    ]


def test_names_with_quotes_stay_valid_json(tmp_path: Path) -> None:
    records = token_records((0, [0]))
    events = events_of(records, tmp_path, context=ReportContext(labels=('a "quoted" \\ name',)))
    assert 'request a "quoted" \\ name' in {event["name"] for event in events}


def test_tracks_of_requests_belong_to_their_replica(pressed: Records, tmp_path: Path) -> None:
    names = {
        event["pid"]: event["args"]["name"]
        for event in of_kind(events_of(pressed, tmp_path), "M")
        if "name" in event["args"] and event["name"] == "process_name"
    }
    assert names == {1: "replica 0", 1 + REQUESTS_PID_OFFSET: "requests of replica 0"}
    assert {event["pid"] for event in of_kind(events_of(pressed, tmp_path), "b")} == {1 + REQUESTS_PID_OFFSET}


def test_the_same_run_gives_the_same_bytes(pressed: Records, tmp_path: Path) -> None:
    write_trace(tmp_path / "a.json", pressed)
    write_trace(tmp_path / "b.json", pressed)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
