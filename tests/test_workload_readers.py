"""Every trace format is read as it stands, and what cannot be read is named with its file, line and reason."""

from __future__ import annotations

import csv
import gzip
import json
import pickle
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from windtunnel.scenarios.workloads import (
    FORMATS,
    TraceError,
    describe,
    detect_format,
    read_trace,
    scale_rate,
    slice_time,
    truncate,
)
from windtunnel.scenarios.workloads.timeunit import detect_time_unit

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
AZURE_ROWS = [
    "2023-11-16 18:17:03.9799600,4808,10",
    "2023-11-16 18:17:04.0319600,3180,8",
    "2023-11-16 18:17:04.0781490,110,27",
]
BURST_HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"


def write(path: Path, *lines: str, end: str = "\n") -> Path:
    path.write_bytes((end.join(lines) + end).encode())
    return path


def azure(tmp_path: Path, *rows: str) -> Path:
    return write(tmp_path / "trace.csv", AZURE_HEADER, *rows)


def json_lines(path: Path, *objects: object) -> Path:
    return write(path, *map(json.dumps, objects))


def mooncake_row(at: float, length: int, ids: list[Any], output: int = 5) -> dict[str, Any]:
    return {"timestamp": at, "input_length": length, "output_length": output, "hash_ids": ids}


def bench_result(**changes: object) -> dict[str, Any]:
    result: dict[str, Any] = {
        "date": "20261129-143842",
        "endpoint_type": "vllm",
        "request_rate": "inf",
        "max_concurrency": None,
        "num_prompts": 3,
        "input_lens": [10, 20, 30],
        "output_lens": [1, 2, 3],
        "start_times": [100.5, 100.0, 101.25],
        "queue_times": [0.25, 0.0, 0.5],
        "errors": ["", "", ""],
    }
    return {**result, **changes}


def error_of(path: Path, **options: Any) -> TraceError:
    with pytest.raises(TraceError) as caught:
        read_trace(path, **options)
    return caught.value


# Azure


def test_an_azure_trace_keeps_its_hundred_nanosecond_ticks(tmp_path: Path) -> None:
    trace = read_trace(azure(tmp_path, *AZURE_ROWS))
    assert trace.arrival_ns.tolist() == [0, 52_000_000, 98_189_000]
    assert trace.num_prompt_tokens.tolist() == [4808, 3180, 110]
    assert trace.num_output_tokens.tolist() == [10, 8, 27]
    assert trace.max_tokens.tolist() == [10, 8, 27]
    assert trace.labels == ("line 2", "line 3", "line 4")
    assert trace.content is None


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_file_without_a_last_line_end_and_with_a_byte_order_mark_is_read_whole(tmp_path: Path, end: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbf" + end.join([AZURE_HEADER, *AZURE_ROWS]).encode())
    assert len(read_trace(path)) == 3


def test_times_with_and_without_fraction_and_zone_mix(tmp_path: Path) -> None:
    path = azure(
        tmp_path,
        "2024-05-10 00:00:00.009930+00:00,10,1",
        "2024-05-10 00:00:01+00:00,10,1",
        "2024-05-10T02:00:02.5+02:00,10,1",
        "2024-05-10 00:00:03Z,10,1",
    )
    assert read_trace(path).arrival_ns.tolist() == [0, 990_070_000, 2_490_070_000, 2_990_070_000]


def test_plain_numbers_are_accepted_as_azure_times(tmp_path: Path) -> None:
    trace = read_trace(azure(tmp_path, "0.5,10,1", "0.75,10,1"))
    assert trace.arrival_ns.tolist() == [0, 250_000_000]
    assert any("seconds" in note and "time_unit" in note for note in trace.notes)


def test_a_gzip_file_is_unpacked_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(gzip.compress("\n".join([AZURE_HEADER, *AZURE_ROWS]).encode()))
    assert len(read_trace(path)) == 3


def test_damaged_gzip_data_is_an_error_of_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress("\n".join([AZURE_HEADER, *AZURE_ROWS * 4000]).encode())[:-40])
    assert "damaged" in str(error_of(path))


@pytest.mark.parametrize("separator", [";", "\t"])
def test_other_separators_are_found_in_the_header(tmp_path: Path, separator: str) -> None:
    path = write(tmp_path / "t.csv", *(row.replace(",", separator) for row in [AZURE_HEADER, *AZURE_ROWS]))
    assert len(read_trace(path)) == 3


def test_columns_that_nothing_reads_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", AZURE_HEADER + ",Region", *(row + ",eu" for row in AZURE_ROWS))
    assert "Columns not used: Region." in read_trace(path).notes


# Where an error is


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("2023-11-16 18:17:05.0,-3,10", "ContextTokens is -3, must be at least 1"),
        ("2023-11-16 18:17:05.0,0,10", "ContextTokens is 0, must be at least 1"),
        ("2023-11-16 18:17:05.0,5,0", "GeneratedTokens is 0, must be at least 1"),
        ("2023-11-16 18:17:05.0,abc,10", "ContextTokens is 'abc', not a number"),
        ("2023-11-16 18:17:05.0,1.5,10", "ContextTokens is '1.5', not a whole number"),
        ("2023-11-16 18:17:05.0,nan,10", "ContextTokens is 'nan', not a finite number"),
        ("2023-11-16 18:17:05.0,5,", "GeneratedTokens is missing"),
        ("2023-11-16 18:17:05.0,5", "the row has 2 cells, the header 3"),
        ("2023-11-16 18:17:05.0,5,6,7", "the row has 4 cells, the header 3"),
        ("2023-11-16 18:17:05.0,99999999999999999999,6", "ContextTokens is '99999999999999999999', far too large"),
        ("2023-11-16 18:17:05.0,5,4000000000", "GeneratedTokens is 4,000,000,000, must be at most 2,147,483,647"),
        ("yesterday,5,6", "TIMESTAMP is 'yesterday', not a time"),
        ("2023-13-41 18:17:05.0,5,6", "which is no date and time"),
    ],
)
def test_a_bad_row_names_its_file_and_line(tmp_path: Path, row: str, reason: str) -> None:
    path = azure(tmp_path, AZURE_ROWS[0], "", AZURE_ROWS[1], row, AZURE_ROWS[2])
    error = error_of(path)
    assert (error.path, error.line) == (str(path), 5)
    assert reason in error.reason
    assert str(error).startswith(f"{path}:5: ")
    assert "on_bad_row" in error.reason


def test_the_first_of_several_bad_rows_is_named(tmp_path: Path) -> None:
    path = azure(tmp_path, AZURE_ROWS[0], "2023-11-16 18:17:05.0,5,-1", "2023-11-16 18:17:05.0,-1,5")
    assert error_of(path).line == 3


def test_a_bad_row_is_left_out_on_request_and_counted(tmp_path: Path) -> None:
    bad = [f"2023-11-16 18:17:05.0,{-n},1" for n in range(1, 6)]
    trace = read_trace(azure(tmp_path, AZURE_ROWS[0], *bad, AZURE_ROWS[2]), on_bad_row="skip")
    assert trace.num_prompt_tokens.tolist() == [4808, 110]
    assert trace.labels == ("line 2", "line 8")
    (note,) = (note for note in trace.notes if note.startswith("Left out"))
    assert "5 of 7 rows" in note
    assert "line 3 (ContextTokens is -1" in note
    assert "and 2 more" in note


@given(st.lists(st.sampled_from(["good", "bad", "blank"]), max_size=30))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_row_is_lost_in_silence(tmp_path: Path, kinds: list[str]) -> None:
    text = {"good": AZURE_ROWS[0], "bad": "2023-11-16 18:17:05.0,-1,1", "blank": ""}
    path = azure(tmp_path, AZURE_ROWS[1], *(text[kind] for kind in kinds))
    count = Counter(kinds)
    trace = read_trace(path, on_bad_row="skip")
    assert len(trace) == 1 + count["good"]
    noted = [note for note in trace.notes if note.startswith("Left out")]
    assert len(noted) == min(count["bad"], 1)
    if noted:
        assert f"Left out {count['bad']} of {1 + count['good'] + count['bad']} rows" in noted[0]
        assert error_of(path).line == 3 + kinds.index("bad")


def test_a_quoted_cell_over_several_lines_does_not_shift_the_line_numbers(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.csv", "arrival_s,num_prompt_tokens,num_output_tokens,request_id", '0,5,5,"a\nb"', '1,5,-5,"c"'
    )
    assert error_of(path).line == 4


def test_broken_quoting_is_named_with_its_line(tmp_path: Path) -> None:
    path = azure(tmp_path, AZURE_ROWS[0], '2023-11-16 18:17:05.0,"5"x,6')
    assert error_of(path).line == 3


def test_a_missing_column_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "TIMESTAMP,ContextTokens,Generated", "0,1,2")
    error = error_of(path)
    assert error.line == 1
    assert "'GeneratedTokens'" in error.reason
    assert "TIMESTAMP, ContextTokens, Generated" in error.reason


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", AZURE_HEADER + ",contexttokens", "0,1,2,3")
    assert "twice" in str(error_of(path))


def test_an_empty_trace_is_an_error(tmp_path: Path) -> None:
    assert "empty" in str(error_of(write(tmp_path / "empty.csv", "", "")))
    assert "no usable request" in str(error_of(azure(tmp_path)))
    for kind in FORMATS:
        error_of(write(tmp_path / "empty.csv", ""), format=kind)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.csv"):
        read_trace(tmp_path / "nowhere.csv")
    with pytest.raises(OSError, match="directory"):
        read_trace(tmp_path)


def test_a_file_that_is_no_text_is_named_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(f"{AZURE_HEADER}\n0,1,\xff".encode("latin-1"))
    error = error_of(path)
    assert error.line == 2
    assert "UTF-8" in error.reason


def test_an_unknown_format_lists_those_that_are_accepted(tmp_path: Path) -> None:
    error = error_of(write(tmp_path / "t.csv", "name,height", "Anna,170"))
    for word in ("name, height", "Azure", "Mooncake", "BurstGPT", "ShareGPT", "--save-detailed", "arrival_s"):
        assert word in error.reason


def test_a_trace_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(TraceError("a.csv", 7, "wrong")))
    assert (error.path, error.line, error.reason, str(error)) == ("a.csv", 7, "wrong", "a.csv:7: wrong")


# Order, unit, slices


def test_requests_are_sorted_stably_and_it_is_said(tmp_path: Path) -> None:
    path = azure(tmp_path, "3,1,1", "1,2,1", "3,3,1", "1,4,1", "2,5,1")
    trace = read_trace(path, time_unit="s")
    assert trace.num_prompt_tokens.tolist() == [2, 4, 5, 1, 3]
    assert trace.arrival_ns.tolist() == [0, 0, 10**9, 2 * 10**9, 2 * 10**9]
    assert any("not in order" in note and "line 3" in note for note in trace.notes)


def test_many_requests_of_one_time_keep_the_order_of_the_file(tmp_path: Path) -> None:
    rows = [f"{1 + n % 2},{n + 1},1" for n in range(2000)]
    trace = read_trace(azure(tmp_path, *rows), time_unit="s")
    assert trace.num_prompt_tokens.tolist() == [*range(1, 2001, 2), *range(2, 2001, 2)]


def test_a_sorted_trace_says_nothing_about_order(tmp_path: Path) -> None:
    assert not any("order" in note for note in read_trace(azure(tmp_path, *AZURE_ROWS)).notes)


def test_a_time_that_steps_back_too_far_is_a_bad_row(tmp_path: Path) -> None:
    path = azure(tmp_path, "0,1,1", "10,2,1", "9.5,3,1", "3,4,1", "11,5,1")
    error = error_of(path, time_unit="s", max_backwards_s=1)
    assert error.line == 5
    assert "steps back by 7 s" in error.reason
    kept = read_trace(path, time_unit="s", max_backwards_s=1, on_bad_row="skip")
    assert kept.num_prompt_tokens.tolist() == [1, 3, 2, 5]


@pytest.mark.parametrize(
    ("times", "usual", "unit"),
    [
        ([0, 3_536_999] + [1000] * 12_029, None, "ms"),
        ([0.0, 61.114, 7200.0] + [100.0] * 40_000, None, "s"),
        ([1.7e9, 1.7e9 + 60], None, "s"),
        ([1_700_000_000_000, 1_700_000_060_000], None, "ms"),
        ([1_700_000_000_000_000, 1_700_000_060_000_000], None, "us"),
        ([1_700_000_000_000_000_000, 1_700_000_060_000_000_000], None, "ns"),
        ([5, 5_270_000] + [45] * 300_000, "s", "s"),
        ([5, 5_270_000_000] + [45] * 1000, "s", "ms"),
        ([7, 7], "ms", "ms"),
        ([7], None, "s"),
        ([0, 40, 90], "ms", "ms"),
        ([0, 1, 2, 3, 3, 3, 3, 3, 3, 3], "ms", "s"),
    ],
)
def test_the_unit_of_time_is_judged_by_span_and_said(times: list[float], usual: Any, unit: str) -> None:
    found, reason = detect_time_unit(np.array(times), usual)
    assert found == unit
    assert {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}[unit] in reason


def test_a_given_unit_wins_and_is_said(tmp_path: Path) -> None:
    path = azure(tmp_path, "0,1,1", "1000,1,1")
    assert read_trace(path).arrival_ns.tolist() == [0, 10**9]
    given_unit = read_trace(path, time_unit="us")
    assert given_unit.arrival_ns.tolist() == [0, 10**6]
    assert "Times read as microseconds, as given." in given_unit.notes


def test_a_unit_that_contradicts_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"leave time_unit \(--time-unit\) out"):
        read_trace(azure(tmp_path, *AZURE_ROWS), time_unit="ms")


def test_a_time_out_of_range_is_named_with_its_line(tmp_path: Path) -> None:
    assert error_of(azure(tmp_path, "0,1,1", "99999999999999,1,1"), time_unit="s").line == 3


def test_a_window_counts_from_its_beginning(tmp_path: Path) -> None:
    path = azure(tmp_path, *(f"{100 + t},{t + 1},1" for t in range(10)))
    trace = read_trace(path, time_unit="s", start_s=2.5, duration_s=4, limit=3, rate_scale=2)
    assert trace.num_prompt_tokens.tolist() == [4, 5, 6]
    assert trace.arrival_ns.tolist() == [250_000_000, 750_000_000, 1_250_000_000]
    assert [note for note in trace.notes if "Window" in note or "First" in note or "scaled" in note] == [
        "Window from 2.5 s for 4 s: 4 of 10 requests; it begins at 0.",
        "First 3 of 4 requests.",
        "Arrivals scaled: 2 times the rate (gaps divided by 2).",
    ]


def test_an_empty_window_says_how_long_the_trace_is(tmp_path: Path) -> None:
    error = error_of(azure(tmp_path, "0,1,1", "30,1,1"), time_unit="s", start_s=31)
    assert "2 requests from 0 to 30.000 s" in error.reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate_scale": 0}, "rate_scale must be above 0"),
        ({"rate_scale": float("nan")}, "rate_scale must be above 0"),
        ({"rate_scale": 1e-12}, "292 years"),
        ({"start_s": -1}, "start_s must be at least 0"),
        ({"duration_s": 0}, "duration_s must be above 0"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"format": "parquet"}, "format must be auto, azure"),
        ({"time_unit": "minutes"}, "time_unit must be auto, s, ms"),
        ({"on_bad_row": "ignore"}, 'on_bad_row must be "error" or "skip"'),
        ({"max_backwards_s": -1}, "max_backwards_s must be at least 0"),
        ({"chunk_tokens": 16}, "chunk_tokens belongs to mooncake traces"),
        ({"trace_model": "GPT-4"}, "trace_model belongs to burstgpt traces"),
        ({"trace_run": 0}, "trace_run belongs to vllm-bench traces"),
        ({"all_turns": True}, "all_turns belongs to sharegpt traces"),
    ],
)
def test_an_argument_out_of_range_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_trace(azure(tmp_path, *AZURE_ROWS), **options)


TIMES = st.lists(st.integers(0, 10**6), min_size=1, max_size=40)


@given(TIMES, st.floats(0, 400), st.floats(0, 400), st.integers(1, 50))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_windows_compose(tmp_path: Path, times_ms: list[int], a: float, b: float, limit: int) -> None:
    whole = read_trace(azure(tmp_path, *(f"{t},{n + 1},1" for n, t in enumerate(times_ms))), time_unit="ms")
    a, b = round(a, 3), round(b, 3)
    twice, once = slice_time(slice_time(whole, a), b), slice_time(whole, a + b)
    assert twice.arrival_ns.tolist() == once.arrival_ns.tolist()
    assert twice.labels == once.labels
    left, right = slice_time(whole, None, a or None), slice_time(whole, a)
    if a:
        assert left.num_prompt_tokens.tolist() + right.num_prompt_tokens.tolist() == whole.num_prompt_tokens.tolist()
    first = truncate(whole, limit)
    assert len(first) == min(limit, len(whole))
    assert truncate(truncate(whole, limit + 3), limit).num_prompt_tokens.tolist() == first.num_prompt_tokens.tolist()


@given(TIMES, st.floats(0.01, 100))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_scaling_keeps_requests_and_order_and_divides_times(tmp_path: Path, times_ms: list[int], factor: float) -> None:
    whole = read_trace(azure(tmp_path, *(f"{t},{n + 1},{n + 2}" for n, t in enumerate(times_ms))), time_unit="ms")
    scaled = scale_rate(whole, factor)
    assert scaled.labels == whole.labels
    assert scaled.num_prompt_tokens.sum() == whole.num_prompt_tokens.sum()
    assert scaled.num_output_tokens.sum() == whole.num_output_tokens.sum()
    assert np.abs(scaled.arrival_ns - whole.arrival_ns / factor).max() <= 0.5 + 1e-6
    back = scale_rate(scaled, 1 / factor)
    assert np.abs(back.arrival_ns - whole.arrival_ns).max() <= factor + 1


# Mooncake


def shared_tokens(trace: Any, a: int, b: int) -> int:
    """How many first tokens two requests have in common, read off the contract of streams and segments."""
    common = 0
    for stream, end in trace.content[a]:
        common = max([common, *(min(end, other_end) for other, other_end in trace.content[b] if other == stream)])
    return common


def test_a_mooncake_trace_shares_what_its_hash_ids_say(tmp_path: Path) -> None:
    path = json_lines(
        tmp_path / "t.jsonl",
        mooncake_row(0, 1100, [0, 1, 2]),
        mooncake_row(40, 1500, [0, 1, 3]),
        mooncake_row(90, 600, [7, 1]),
        mooncake_row(140, 700, [7, 9]),
    )
    trace = read_trace(path)
    assert trace.arrival_ns.tolist() == [0, 40_000_000, 90_000_000, 140_000_000]
    assert shared_tokens(trace, 0, 1) == 1024
    assert shared_tokens(trace, 0, 2) == 0, "an id behind another parent is other content"
    assert shared_tokens(trace, 2, 3) == 512
    assert any("512 tokens" in note for note in trace.notes)
    assert any("milliseconds" in note for note in trace.notes)


@st.composite
def hash_chains(draw: st.DrawFn) -> tuple[int, list[tuple[int, list[int]]]]:
    """A block size and prompts as (length, ids); a cut last block is shared by equal prompts only."""
    chunk = draw(st.sampled_from([16, 512]))
    rows = []
    for number in range(draw(st.integers(1, 12))):
        ids = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
        rest = draw(st.integers(1, chunk))
        rows.append((chunk * (len(ids) - 1) + rest, ids if rest == chunk else [*ids[:-1], 1000 + number]))
    again = draw(st.lists(st.sampled_from(rows), max_size=3))
    return chunk, rows + again


@given(hash_chains())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_two_requests_share_exactly_their_common_hash_ids(
    tmp_path: Path, chains: tuple[int, list[tuple[int, list[int]]]]
) -> None:
    chunk, rows = chains
    path = json_lines(tmp_path / "t.jsonl", *(mooncake_row(n, length, ids) for n, (length, ids) in enumerate(rows)))
    trace = read_trace(path, chunk_tokens=chunk)
    any_shared = False
    for a in range(len(rows)):
        for b in range(a):
            same = 0
            while same < min(len(rows[a][1]), len(rows[b][1])) and rows[a][1][same] == rows[b][1][same]:
                same += 1
            expected = min(same * chunk, rows[a][0], rows[b][0])
            any_shared |= expected > 0
            assert (0 if trace.content is None else shared_tokens(trace, a, b)) == expected
    assert (trace.content is not None) == any_shared
    for segments in trace.content or ():
        ends = [end for _, end in segments]
        assert ends == sorted(set(ends))
        assert all(0 <= stream < trace.num_streams for stream, _ in segments)


def test_the_alibaba_variant_has_seconds_and_blocks_of_sixteen(tmp_path: Path) -> None:
    rows = [
        {"chat_id": n, "type": "text", "turn": 1, **mooncake_row(0.15 * n, 40 + n % 5, [0, 1, 100 + n])}
        for n in range(50)
    ]
    trace = read_trace(json_lines(tmp_path / "t.jsonl", *rows))
    assert trace.arrival_ns[1] == 150_000_000
    assert shared_tokens(trace, 3, 30) == 32
    assert any("16 tokens" in note for note in trace.notes)
    assert any("seconds" in note and "per" not in note.split(",")[0] for note in trace.notes)
    assert "Columns not used: chat_id, type, turn." in trace.notes


def test_a_block_size_where_only_full_blocks_are_hashed_is_found(tmp_path: Path) -> None:
    trace = read_trace(
        json_lines(
            tmp_path / "t.jsonl",
            *(mooncake_row(n * 100, n, list(range(n // 64))) for n in (63, 64, 127, 640, 700, 1000)),
        )
    )
    assert any("64 tokens" in note and "rounded down" in note for note in trace.notes)
    assert shared_tokens(trace, 3, 4) == 640


def test_hash_ids_may_be_texts_or_missing(tmp_path: Path) -> None:
    row = mooncake_row(2000, 300, [])
    del row["hash_ids"]
    path = json_lines(
        tmp_path / "t.jsonl", mooncake_row(0, 1024, ["ab", "cd"]), mooncake_row(1000, 1024, ["ab", "ef"]), row
    )
    trace = read_trace(path)
    assert shared_tokens(trace, 0, 1) == 512
    assert trace.content is not None
    assert trace.content[2] == ()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"timestamp": 1, "input_length": 600, "output_length": 0, "hash_ids": [0, 1]}', "output_length is 0"),
        ('{"timestamp": 1, "input_length": true, "output_length": 1, "hash_ids": [0]}', "True, not a number"),
        ('{"timestamp": 1, "input_length": "600", "output_length": 1, "hash_ids": [0, 1, 2]}', "too many"),
        ('{"timestamp": 1, "output_length": 1, "hash_ids": [0, 1]}', "input_length is missing"),
        ('{"timestamp": "now", "input_length": 600, "output_length": 1, "hash_ids": [0, 1]}', "timestamp is 'now'"),
        ('{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": 5}', "hash_ids is 5"),
        ('{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1.5]}', "hash_ids is [1.5]"),
        ('{"timestamp": 1, "input_length": 600,', "not JSON"),
        ("[1, 2]", "a JSON object is needed"),
    ],
)
def test_a_bad_mooncake_row_names_its_line(tmp_path: Path, line: str, reason: str) -> None:
    good = [json.dumps(mooncake_row(n, 1000 + n, [n, n + 1])) for n in range(20)]
    path = write(tmp_path / "t.jsonl", *good[:10], "", line, *good[10:])
    error = error_of(path)
    assert error.line == 12
    assert reason in error.reason
    assert len(read_trace(path, on_bad_row="skip")) == 20


def test_prompts_that_fit_no_block_size_ask_for_one(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "t.jsonl", mooncake_row(0, 50, [0, 1, 2]), mooncake_row(100, 5000, [0, 1, 2]))
    assert "chunk_tokens" in error_of(path).reason
    with pytest.raises(ValueError, match="chunk_tokens must be at least 1"):
        read_trace(path, chunk_tokens=0)


# BurstGPT


def test_a_burstgpt_trace_is_read_by_header_name_and_failures_are_counted(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.csv",
        "Log Type,Response tokens,Model,Timestamp,Request tokens",
        "Conversation log,18,ChatGPT,5,472",
        "API log,0,ChatGPT,45,1087",
        "API log,276,GPT-4,118,417",
        "API log,0,GPT-4,120,0",
    )
    trace = read_trace(path)
    assert trace.arrival_ns.tolist() == [0, 113 * 10**9]
    assert trace.num_prompt_tokens.tolist() == [472, 417]
    assert any("Left out 2 of 4 requests that failed (0 response tokens): line 3, 5." in note for note in trace.notes)
    only = read_trace(path, trace_model="GPT-4")
    assert only.num_prompt_tokens.tolist() == [417]
    assert any("2 requests of model GPT-4" in note for note in only.notes)
    assert "there are ChatGPT, GPT-4" in str(error_of(path, trace_model="GPT-5"))


def test_burstgpt_sessions_are_accepted_and_said_not_to_share(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.csv",
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
        "19440110.0,7,3.5,ChatGPT,10,20,30,Conversation log",
        "19440112.5,,2.0,GPT-4,11,21,32,API log",
    )
    trace = read_trace(path)
    assert trace.arrival_ns.tolist() == [0, 2_500_000_000]
    assert any("1 sessions" in note for note in trace.notes)
    assert any("Elapsed time" in note and "not used" in note for note in trace.notes)


def test_a_burstgpt_response_to_nothing_is_a_bad_row(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", BURST_HEADER, "5,GPT-4,0,10,10,API log")
    assert error_of(path).line == 2


def test_a_burstgpt_trace_of_failures_only_is_empty(tmp_path: Path) -> None:
    error = error_of(write(tmp_path / "t.csv", BURST_HEADER, "5,GPT-4,10,0,10,API log"))
    assert "no usable request" in error.reason
    assert "failed" in error.reason


# ShareGPT


CONVERSATIONS = [
    {
        "id": "one",
        "conversations": [
            {"from": "system", "num_tokens": 100},
            {"from": "human", "num_tokens": 12},
            {"from": "gpt", "num_tokens": 80, "value": "text"},
            {"from": "human", "num_tokens": 5},
            {"from": "gpt", "num_tokens": 40},
            {"from": "human", "num_tokens": 9},
        ],
    },
    {"prompt_tokens": 30, "completion_tokens": 7},
    {"id": 3, "conversations": [{"role": "user", "tokens": 4}, {"role": "assistant", "tokens": 6}]},
]


@pytest.mark.parametrize("indent", [None, 2])
def test_conversations_with_counts_give_their_first_turns(tmp_path: Path, indent: int | None) -> None:
    path = write(tmp_path / "t.json", json.dumps(CONVERSATIONS, indent=indent))
    trace = read_trace(path)
    assert trace.num_prompt_tokens.tolist() == [112, 30, 4]
    assert trace.num_output_tokens.tolist() == [80, 7, 6]
    assert trace.arrival_ns.tolist() == [0, 0, 0]
    assert trace.labels == ("one", "entry 2", "3")
    assert any("1 later turns not used" in note for note in trace.notes)
    assert any("all requests are due at once" in note for note in trace.notes)


def test_whole_conversations_follow_turn_by_turn(tmp_path: Path) -> None:
    trace = read_trace(json_lines(tmp_path / "t.jsonl", *CONVERSATIONS), all_turns=True)
    assert trace.num_prompt_tokens.tolist() == [112, 197, 30, 4]
    assert trace.previous.tolist() == [-1, 0, -1, -1]
    assert trace.arrival_ns.tolist() == [0, -1, 0, 0]
    assert shared_tokens(trace, 0, 1) == 192
    assert shared_tokens(trace, 0, 2) == 0


def test_plain_sharegpt_text_says_that_counts_are_needed(tmp_path: Path) -> None:
    text = [{"id": "x", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}]
    error = error_of(write(tmp_path / "t.json", json.dumps(text)))
    for word in ("token counts", "tokenizer", "num_tokens", "prompt_tokens"):
        assert word in error.reason


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"conversations": [{"from": "gpt", "num_tokens": 3}]}, "the model speaks before the human"),
        ({"conversations": [{"from": "human", "num_tokens": 3}]}, "no human turn that a model answers"),
        ({"conversations": [{"from": "alien", "num_tokens": 3}]}, "'alien'"),
        ({"conversations": [{"from": "human", "num_tokens": -3}]}, "num_tokens is -3"),
        ({"conversations": [{"from": "human"}]}, "there is none of num_tokens"),
        ({"conversations": 7}, "conversations is not a list"),
        ({"prompt_tokens": 3}, "there is none of output_tokens"),
        (7, "a conversation is a JSON object"),
    ],
)
def test_a_bad_conversation_names_its_line(tmp_path: Path, entry: Any, reason: str) -> None:
    listed = ",\n".join(json.dumps(value) for value in (*CONVERSATIONS, entry, *CONVERSATIONS))
    path = write(tmp_path / "t.json", f"[\n{listed}\n]")
    error = error_of(path)
    assert error.line == 5
    assert reason in error.reason
    assert len(read_trace(path, on_bad_row="skip")) == 6


def test_json_that_is_cut_off_is_named_with_its_line(tmp_path: Path) -> None:
    whole = json.dumps(CONVERSATIONS, indent=1)
    half = whole[: len(whole) // 2]
    path = tmp_path / "t.json"
    path.write_text(half)
    assert error_of(path).line == half.count("\n") + 1
    path.write_text(whole[:-1])
    assert "never closed" in error_of(path).reason


# vllm bench serve


def test_a_benchmark_result_gives_its_requests_when_they_were_sent(tmp_path: Path) -> None:
    trace = read_trace(json_lines(tmp_path / "r.json", bench_result()))
    assert trace.num_prompt_tokens.tolist() == [20, 10, 30]
    assert trace.arrival_ns.tolist() == [0, 500_000_000, 1_250_000_000]
    assert trace.labels == ("request 1", "request 0", "request 2")
    assert trace.max_concurrency is None


def test_a_limited_benchmark_run_is_due_before_its_wait_and_keeps_the_limit(tmp_path: Path) -> None:
    trace = read_trace(json_lines(tmp_path / "r.json", bench_result(max_concurrency=2)))
    assert trace.arrival_ns.tolist() == [0, 250_000_000, 750_000_000]
    assert trace.max_concurrency == 2
    without = read_trace(json_lines(tmp_path / "r.json", bench_result(max_concurrency=2, queue_times=[])))
    assert without.arrival_ns.tolist() == [0, 500_000_000, 1_250_000_000]


def test_failed_benchmark_requests_are_left_out_and_counted(tmp_path: Path) -> None:
    result = bench_result(output_lens=[1, 0, 3], errors=["", "", "timeout"], start_times=[5.0, 0.0, 6.0])
    trace = read_trace(json_lines(tmp_path / "r.json", result))
    assert trace.num_prompt_tokens.tolist() == [10]
    assert trace.arrival_ns.tolist() == [0]
    assert any("Left out 2 of 3 requests that failed" in note and ": 1, 2." in note for note in trace.notes)


@pytest.mark.parametrize("missing", ["input_lens", "output_lens"])
def test_a_result_without_details_names_the_flag(tmp_path: Path, missing: str) -> None:
    result = bench_result()
    del result[missing]
    error = error_of(json_lines(tmp_path / "r.json", result))
    assert missing in error.reason
    assert "--save-detailed" in error.reason


def test_a_result_of_an_older_vllm_has_no_times(tmp_path: Path) -> None:
    result = bench_result()
    del result["start_times"]
    trace = read_trace(json_lines(tmp_path / "r.json", result))
    assert trace.arrival_ns.tolist() == [0, 0, 0]
    assert any("no start_times" in note for note in trace.notes)


def test_one_of_several_appended_results_has_to_be_chosen(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "r.json", bench_result(), bench_result(date="tomorrow", input_lens=[1, 2, 3]))
    error = error_of(path)
    for word in ("2 runs", "trace_run (--trace-run)", "20261129-143842", "1: date tomorrow", "request_rate inf"):
        assert word in error.reason
    assert read_trace(path, trace_run=1).num_prompt_tokens.tolist() == [2, 1, 3]
    assert "there is no run 2" in str(error_of(path, trace_run=2))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"output_lens": [1, 2]}, "output_lens has 2 values, input_lens 3"),
        ({"input_lens": [1, -2, 3]}, "request 1: input_lens is -2"),
        ({"input_lens": [0, 2, 3]}, "request 0: input_lens is 0"),
        ({"start_times": [1.0, None, 2.0]}, "request 1: start_times is missing"),
        ({"input_lens": "many"}, "not a list"),
        ({"max_concurrency": 0}, "max_concurrency is 0"),
    ],
)
def test_a_bad_benchmark_request_is_named(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    path = json_lines(tmp_path / "r.json", bench_result(), bench_result(**changes))
    error = error_of(path, trace_run=1)
    assert error.line == 2
    assert reason in error.reason


# windtunnel's own


def test_our_own_csv_takes_all_columns(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.csv",
        "# made by hand",
        "arrival_s,num_prompt_tokens,num_output_tokens,max_tokens,priority,request_id,prefix_group,prefix_tokens",
        "10.5,100,5,,,first,g,64",
        "11.0,200,5,50,-2,second,g,96",
        "12.0,300,5,50,1,third,h,96",
        "13.0,300,5,50,1,fourth,,",
    )
    trace = read_trace(path)
    assert trace.arrival_ns.tolist() == [0, 500_000_000, 1_500_000_000, 2_500_000_000]
    assert trace.max_tokens.tolist() == [5, 50, 50, 50]
    assert trace.priority.tolist() == [0, -2, 1, 1]
    assert trace.labels == ("first", "second", "third", "fourth")
    assert shared_tokens(trace, 0, 1) == 64
    assert shared_tokens(trace, 1, 2) == 0
    assert trace.content is not None
    assert trace.content[3] == ()


@pytest.mark.parametrize(("column", "unit_ns"), [("arrival_s", 10**9), ("arrival_ms", 10**6), ("arrival_ns", 1)])
def test_the_unit_of_our_own_times_is_in_the_name(tmp_path: Path, column: str, unit_ns: int) -> None:
    rows = [{column: 7, "num_prompt_tokens": 1, "num_output_tokens": 1}]
    rows.append({column: 9, "num_prompt_tokens": 1, "num_output_tokens": 1})
    assert read_trace(json_lines(tmp_path / "t.jsonl", *rows)).arrival_ns.tolist() == [0, 2 * unit_ns]


def test_sessions_of_our_own_wait_for_the_answer_before(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.csv",
        "arrival_s,num_prompt_tokens,num_output_tokens,session_id,think_s,prefix_group,prefix_tokens",
        "5,100,10,b,,system,32",
        "2,60,10,a,,system,32",
        ",150,10,b,1.5,system,32",
        ",80,10,a,0.25,system,32",
        "3,40,10,,,,",
    )
    trace = read_trace(path)
    assert trace.num_prompt_tokens.tolist() == [60, 80, 40, 100, 150]
    assert trace.arrival_ns.tolist() == [0, -1, 10**9, 3 * 10**9, -1]
    assert trace.previous.tolist() == [-1, 0, -1, -1, 3]
    assert trace.think_ns.tolist() == [0, 250_000_000, 0, 0, 1_500_000_000]
    assert shared_tokens(trace, 0, 1) == 70
    assert shared_tokens(trace, 1, 4) == 32
    assert shared_tokens(trace, 3, 4) == 110


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (",109,10,a,0,g,8", "num_prompt_tokens is 109, but the conversation before this turn has 110 tokens"),
        (",150,10,a,0,h,8", "differ from those of the turn before"),
        (",150,10,new,0,g,8", "arrival_s is missing"),
        ("3,150,10,a,1,g,8", "there is a think time"),
        (",150,10,a,-1,g,8", "think_s is -1, must be at least 0"),
        (",150,10,a,1e12,g,8", "far too long"),
        ("3,150,10,,0,g,151", "prefix_tokens is 151, more than num_prompt_tokens"),
        ("3,150,10,,0,,15", "there is no prefix_group"),
    ],
)
def test_a_bad_turn_names_its_line(tmp_path: Path, row: str, reason: str) -> None:
    header = "arrival_s,num_prompt_tokens,num_output_tokens,session_id,think_s,prefix_group,prefix_tokens"
    path = write(tmp_path / "t.csv", header, "0,100,10,a,0,g,8", row)
    error = error_of(path)
    assert error.line == 3
    assert reason in error.reason


def test_turns_behind_a_bad_one_are_left_out_with_it(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.csv",
        "arrival_s,num_prompt_tokens,num_output_tokens,session_id",
        "0,100,10,a",
        "1,-5,10,b",
        ",200,10,b",
        ",300,10,b",
        ",150,10,a",
    )
    trace = read_trace(path, on_bad_row="skip")
    assert trace.num_prompt_tokens.tolist() == [100, 150]
    assert trace.previous.tolist() == [-1, 0]
    assert any("3 of 5 rows" in note and "follows is left out" in note for note in trace.notes)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ("arrival_s,num_prompt_token,num_output_tokens", "do you mean 'num_prompt_tokens'"),
        ("arrival_s,num_prompt_tokens", "there is no column 'num_output_tokens'"),
        ("num_prompt_tokens,num_output_tokens", "no column arrival_s, arrival_ms or arrival_ns"),
        ("arrival_s,arrival_ms,num_prompt_tokens,num_output_tokens", "exclude each other"),
        ("arrival_s,num_prompt_tokens,num_output_tokens,session_id,previous", "exclude each other"),
        ("arrival_s,num_prompt_tokens,num_output_tokens,prefix_group", "belong together"),
    ],
)
def test_columns_of_our_own_format_are_checked(tmp_path: Path, header: str, reason: str) -> None:
    error = error_of(write(tmp_path / "t.csv", header, ",".join("1" for _ in header.split(","))))
    assert error.line == 1
    assert reason in error.reason


def test_the_engine_sees_a_declared_limit_no_smaller_than_the_truth(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "arrival_s,num_prompt_tokens,num_output_tokens,max_tokens", "0,5,9,8")
    assert "max_tokens is 8, below num_output_tokens (9)" in error_of(path).reason


# Formats are told by content


def test_the_format_is_told_by_content_not_by_name(tmp_path: Path) -> None:
    for kind, lines in {
        "azure": [AZURE_HEADER, *AZURE_ROWS],
        "burstgpt": [BURST_HEADER, "5,GPT-4,1,1,2,API log"],
        "mooncake": [json.dumps(mooncake_row(0, 5, [1]))],
        "sharegpt": [json.dumps(CONVERSATIONS, indent=2)],
        "vllm-bench": [json.dumps(bench_result())],
        "windtunnel": ["arrival_ms,num_prompt_tokens,num_output_tokens", "0,1,1"],
    }.items():
        path = write(tmp_path / "trace.dat", *lines)
        assert detect_format(path) == kind
        assert len(read_trace(path)) >= 1
    assert detect_format(
        json_lines(tmp_path / "x", {"arrival_s": 0, "num_prompt_tokens": 1, "num_output_tokens": 1})
    ) == ("windtunnel")
    assert detect_format(json_lines(tmp_path / "x", {"prompt_tokens": 1, "output_tokens": 1})) == "sharegpt"


# The real files


@pytest.mark.parametrize("name", ["AzureLLMInferenceTrace_code.csv", "AzureLLMInferenceTrace_conv.csv"])
def test_the_real_azure_traces_are_read_to_the_last_token_and_tick(shared: Path, name: str) -> None:
    path = shared / "traces" / name
    if not path.exists():
        pytest.skip(f"{name} is not here")
    count, prompt, output = 0, 0, 0
    stamps = []
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            count += 1
            prompt += int(row["ContextTokens"])
            output += int(row["GeneratedTokens"])
            whole, fraction = row["TIMESTAMP"].split(".")
            moment = datetime.fromisoformat(whole)
            stamps.append(int((moment - datetime(2023, 11, 1)).total_seconds()) * 10**9 + int(fraction.ljust(9, "0")))
    trace = read_trace(path)
    assert len(trace) == count == {"code": 8819, "conv": 19366}[name[-8:-4]]
    assert int(trace.num_prompt_tokens.sum()) == prompt
    assert int(trace.num_output_tokens.sum()) == output
    assert trace.arrival_ns.tolist() == [stamp - stamps[0] for stamp in stamps]
    assert trace.labels is not None
    assert trace.labels[-1] == f"line {count + 1}"


def test_the_real_mooncake_trace_has_the_prefixes_that_its_ids_say(shared: Path) -> None:
    path = shared / "traces" / "mooncake_conversation_trace.jsonl"
    if not path.exists():
        pytest.skip("the trace is not here")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    trace = read_trace(path)
    assert len(trace) == len(rows) == 12_031
    assert int(trace.num_prompt_tokens.sum()) == sum(row["input_length"] for row in rows)
    assert int(trace.num_output_tokens.sum()) == sum(row["output_length"] for row in rows)
    assert trace.arrival_ns.tolist() == [row["timestamp"] * 10**6 for row in rows]
    parents: dict[int, int] = {}
    seen: set[int] = set()
    num_shared = 0
    for row in rows:
        ids = row["hash_ids"]
        for parent, hash_id in zip([-1, *ids], ids, strict=False):
            assert parents.setdefault(hash_id, parent) == parent, "in this file an id stands behind one other only"
        num_shared += min(512 * sum(hash_id in seen for hash_id in ids), row["input_length"])
        seen.update(ids)
    assert describe(trace)["shared_prompt_tokens"] == num_shared


def test_the_real_benchmark_result_is_read_to_the_last_token(shared: Path) -> None:
    path = shared / "live_vllm_cpu" / "formats" / "vllm_bench_serve_0.32.json"
    if not path.exists():
        pytest.skip("the result is not here")
    result = json.loads(path.read_text())
    trace = read_trace(path)
    assert len(trace) == result["completed"]
    assert int(trace.num_prompt_tokens.sum()) == result["total_input_tokens"]
    assert int(trace.num_output_tokens.sum()) == result["total_output_tokens"]
    span_s = max(result["start_times"]) - min(result["start_times"])
    assert trace.arrival_ns[-1] == pytest.approx(span_s * 1e9, abs=2)
