"""Whatever stands in a trace file, a reader gives requests or says what is wrong with the file; it never breaks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from windtunnel.cli.main import main
from windtunnel.scenarios.workloads import FORMATS, TraceError, TraceFormat, describe, read_trace, write_workload

VALID: dict[TraceFormat, str] = {
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
    "2023-11-16 18:17:04.0319600,3180,8\n",
    "mooncake": "".join(
        json.dumps({"timestamp": at, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, at]}) + "\n"
        for at in (3000, 6000, 9000)
    ),
    "burstgpt": "Timestamp,Session ID,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,a,ChatGPT,472,18,490,Conversation log\n45,,GPT-4,12,0,12,API log\n60,b,GPT-4,12,3,15,API log\n",
    "sharegpt": json.dumps(
        [
            {"id": "a", "conversations": [{"from": "human", "num_tokens": 12}, {"from": "gpt", "num_tokens": 80}]},
            {"id": 7, "prompt_tokens": 12, "output_tokens": 80},
        ]
    ),
    "vllm-bench": json.dumps(
        {
            "endpoint_type": "vllm",
            "max_concurrency": 4,
            "input_lens": [10, 20, 30],
            "output_lens": [1, 2, 3],
            "start_times": [100.5, 100.0, 101.25],
            "queue_times": [0.25, 0.0, 0.5],
            "errors": ["", "", "timeout"],
        }
    ),
    "windtunnel": "request_id,arrival_s,num_prompt_tokens,num_output_tokens,max_tokens,priority,session_id,think_s,"
    "prefix_group,prefix_tokens\na,0.5,100,10,20,1,s,,g,40\nb,,200,5,,0,s,1.5,g,40\nc,2,10,1,,,,,,\n",
}
MADE_BY_US = (
    '# windtunnel-workload {"version": 1, "source": "x", "notes": ["n"], "max_concurrency": 3, "num_streams": 4}\n'
    "arrival_ns,num_prompt_tokens,num_output_tokens,previous,think_ns,content,request_id\n"
    "0,10,5,,0,0:10,a\n,30,5,0,1000,0:10 1:20,b\n"
)
JSON_LINES = (
    '{"windtunnel_workload": {"version": 1, "source": "x", "notes": [], "max_concurrency": null, "num_streams": 2}}\n'
    '{"arrival_ns": 0, "num_prompt_tokens": 10, "num_output_tokens": 5, "content": [[0, 10]], "request_id": "a"}\n'
    '{"num_prompt_tokens": 30, "num_output_tokens": 5, "previous": 0, "think_ns": 9, "content": [[0, 10], [1, 20]]}\n'
)
OPTIONS: dict[TraceFormat, list[dict[str, Any]]] = {
    "mooncake": [{"chunk_tokens": 16}],
    "burstgpt": [{"trace_model": "GPT-4"}],
    "sharegpt": [{"all_turns": True}],
    "vllm-bench": [{"trace_run": 0}],
}
SAMPLES = [(name, text.encode()) for name, text in VALID.items()]
SAMPLES += [("windtunnel", MADE_BY_US.encode()), ("windtunnel", JSON_LINES.encode())]

SPICE = [
    b"",
    b"\x00",
    b"\xff",
    b"\r",
    b"\n",
    b'"',
    b",",
    b"{",
    b"[",
    b"]",
    b"}",
    b":",
    b"-",
    b"0",
    b"9" * 400,
    b"9" * 30,
]
SPICE += [b"1e400", b"-1e308", b"NaN", b"Infinity", b"null", b"true", b"[]", b"{}", b'"\\ud800"', b"1.5", b"\xc2\xa0"]
SPICE += [
    b"9" * 5000,
    b"[" * 3000,
    b"\x1f\x8b",
    b"\xef\xbb\xbf",
    b"99999999999999999",
    b"0001-01-01 00:00:00",
    b"\xd9\xa3",
]

quick = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def read(path: Path, data: bytes) -> None:
    """Read the bytes in every way; anything but a whole Workload or a TraceError about this file breaks the test."""
    path.write_bytes(data)
    for format_name in ("auto", *FORMATS):
        for on_bad_row in ("error", "skip"):
            for options in ({}, *OPTIONS.get(format_name, ())):  # type: ignore[call-overload]
                said = _read_once(path, format=format_name, on_bad_row=on_bad_row, **options)
                assert said == "" or said.startswith(str(path))
                assert len(said.encode()) < 2000


def _read_once(path: Path, **options: Any) -> str:
    """What the reader says of the file; nothing if it can be read, described and written again."""
    try:
        made = read_trace(path, **options)
    except TraceError as error:
        return str(error)
    write_workload(made, path.with_suffix(".jsonl"))
    json.dumps(describe(made), allow_nan=False, ensure_ascii=False).encode()
    return ""


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A valid file with some of its bytes replaced, cut out, doubled or moved."""
    _, data = draw(st.sampled_from(SAMPLES))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 12)))
        piece = draw(st.sampled_from(SPICE) | st.binary(max_size=8) | st.just(data[start:end] * 2))
        data = data[:start] + piece + data[end:]
    return gzip.compress(data, mtime=0) if draw(st.integers(0, 19)) == 0 else data


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([10**400, -(10**30)]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def restructured(draw: st.DrawFn) -> bytes:
    """Valid JSON of one of the formats with some of its values replaced by others of any type."""
    texts = [VALID["sharegpt"], VALID["vllm-bench"], VALID["mooncake"], JSON_LINES]
    lines = [json.loads(line) for line in draw(st.sampled_from(texts)).splitlines()]
    for _ in range(draw(st.integers(1, 3))):
        holder: Any = lines
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(holder[key], (dict, list)) and draw(st.booleans()):
                holder = holder[key]
                continue
            holder[key] = draw(JSON)
            break
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


@quick
@given(st.binary(max_size=300))
@example(b"")
@example(b"\r")
@example(b"a\rb\n")
@example(b"\x1f\x8b\x08" + bytes(20))
def test_random_bytes_are_refused_as_a_trace(tmp_path: Path, data: bytes) -> None:
    read(tmp_path / "trace", data)


@quick
@given(mutated())
def test_a_damaged_trace_is_read_or_refused(tmp_path: Path, data: bytes) -> None:
    read(tmp_path / "trace", data)


@quick
@given(restructured())
def test_json_of_another_shape_is_read_or_refused(tmp_path: Path, data: bytes) -> None:
    read(tmp_path / "trace", data)


@pytest.mark.parametrize(("name", "data"), SAMPLES)
def test_the_files_that_are_mutated_are_valid(tmp_path: Path, name: TraceFormat, data: bytes) -> None:
    (tmp_path / "trace").write_bytes(data)
    assert len(read_trace(tmp_path / "trace")) >= 2
    assert len(read_trace(tmp_path / "trace", format=name)) >= 2


@pytest.mark.parametrize("number", range(5))
def test_a_binary_file_is_unreadable_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    monkeypatch.delenv("WINDTUNNEL_DEBUG", raising=False)
    data = bytes((i * i * 31 + number * 7919 + (i >> 3)) % 256 for i in range(3000))
    (tmp_path / "bin").write_bytes(data)
    assert main(["workload", str(tmp_path / "bin")]) == 3
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path / 'bin'}")
    assert "bug" not in said
