"""Joins what the client saw with what the server's recorder wrote, as a folder that ``calibrate.live_runs`` reads."""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.live.client import Seen
from windtunnel.calibrate.live_runs import LiveRun, read_live_run
from windtunnel.sim.workload import Segment, Workload

_REQUEST_ID = re.compile(r"windtunnel-(\d+)-")
"""In the server's ids: the row of the workload; warm-up requests have none."""
_NS_PER_S = 1e9
_NS_PER_MS = 1e6


@dataclass(frozen=True, eq=False, slots=True)
class SharedRun(LiveRun):
    """A live run whose prompts share beginnings."""

    content: tuple[tuple[Segment, ...], ...]
    num_streams: int

    def workload_at(self, arrival_s: NDArray[np.float64], *, max_concurrency: int | None = None) -> Workload:
        """The requests with other arrival times, and with what they share."""
        plain = LiveRun.workload_at(self, arrival_s, max_concurrency=max_concurrency)
        return replace(plain, content=self.content, num_streams=self.num_streams)


def write_run(folder: Path, load: Workload, seen: Seen, recording: Path, after_byte: int) -> LiveRun:
    """Write the run's folder, and read it.  ``after_byte``: what the recording held before the run.

    Raises ValueError for a run with a request that failed, or a recording that does not have all of it.
    """
    _check(seen)
    folder.mkdir(parents=True)
    header, steps = _recorded(recording, after_byte, seen.start_ns)
    _write_json(folder.parent / "engine_config.json", _engine_config(header))
    _write_json(folder / "run.json", {"mode": "open" if load.max_concurrency is None else "closed"})
    _write_lines(folder / "requests.jsonl", _requests(seen))
    with gzip.open(folder / "sched.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in _decisions(steps, seen.start_ns))
    _write_steps(folder / "steps.csv", steps, seen.start_ns)
    return read_run(folder, load)


def read_run(folder: Path, load: Workload) -> LiveRun:
    """A run that was written, of this workload."""
    run = read_live_run(folder)
    return run if load.content is None else _shared(run, load)


def _shared(run: LiveRun, load: Workload) -> SharedRun:
    assert load.content is not None
    rows = [int(label) for label in run.labels]
    plain = {item.name: getattr(run, item.name) for item in fields(LiveRun)}
    return SharedRun(**plain, content=tuple(load.content[row] for row in rows), num_streams=load.num_streams)


def _check(seen: Seen) -> None:
    requests = seen.observed.requests
    bad = np.flatnonzero(~requests.is_finished)
    if len(bad):
        raise ValueError(
            f"{len(bad)} of {len(requests)} requests failed, the first: {requests.errors[int(bad[0])]}; "
            "the server's log may say why"
        )


def _recorded(path: Path, after_byte: int, start_ns: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    with path.open("rb") as file:
        header: dict[str, Any] = json.loads(file.readline())
        file.seek(max(after_byte, file.tell()))
        lines = [json.loads(line) for line in file]
    stopped = next((line["stopped"] for line in lines if "stopped" in line), None)
    if stopped is not None:
        raise ValueError(f"{path}: the recorder stopped: {stopped}")
    return header, [line for line in lines if line["schedule_begin_ns"] >= start_ns]


def _engine_config(header: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_gpu_blocks": header["num_gpu_blocks"],
        "block_size": header["block_size"],
        "max_num_seqs": header["max_num_seqs"],
        "max_num_scheduled_tokens": header["max_num_batched_tokens"],
        "max_model_len": header["max_model_len"],
        "prefix_caching": header["enable_prefix_caching"],
        "chunked_prefill": header["enable_chunked_prefill"],
        "policy": header["policy"],
        "watermark": header["watermark"],
        "reserve_full_isl": header["scheduler_reserve_full_isl"],
        "async_scheduling": header["async_scheduling"],
    }


def _requests(seen: Seen) -> Iterator[dict[str, Any]]:
    table = seen.observed.requests
    for row in range(len(table)):
        chunks = slice(int(table.chunk_offsets[row]), int(table.chunk_offsets[row + 1]))
        yield {
            "id": str(row),
            "prompt_len": int(table.num_prompt_tokens_asked[row]),
            "out_len": int(table.num_output_tokens_asked[row]),
            "t_send": int(table.send_ns[row]) / _NS_PER_S,
            "chunk_t": (table.chunk_ns[chunks] / _NS_PER_S).tolist(),
            "chunk_n": np.cumsum(table.chunk_tokens[chunks]).tolist(),
        }


def _label(request_id: str) -> str:
    found = _REQUEST_ID.search(request_id)
    if found is None:
        raise ValueError(f"request {request_id!r} is not of this run: somebody else uses the server, too")
    return found[1]


def _decisions(steps: Sequence[Mapping[str, Any]], start_ns: int) -> Iterator[dict[str, Any]]:
    for step in steps:
        for request_id, num_prompt_tokens, arrival_ns, added_ns in step["added"]:
            if added_ns >= start_ns:
                times = {"arr": (arrival_ns - start_ns) / _NS_PER_S, "t": (added_ns - start_ns) / _NS_PER_S}
                yield {"ev": "add", "id": _label(request_id), "prompt": num_prompt_tokens, **times}
        yield {
            "i": step["step"],
            "pre": [[_label(request_id)] for request_id in step["preempted"]],
            "det": [[_label(request_id), num, before] for request_id, num, before in step["requests"]],
        }


def _write_steps(path: Path, steps: Sequence[Mapping[str, Any]], start_ns: int) -> None:
    columns = ("i", "t", "exec_ms", "sched_ms", "upd_ms", "gap_ms", "tok", "seqs", "dec", "pairs")
    state = {"running": "num_running", "waiting": "num_waiting", "free_blocks": "num_free_blocks"}
    updated_ns = steps[0]["schedule_begin_ns"] if steps else 0
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow((*columns, *state, "preempted"))
        for step in steps:
            instants = {name: step[f"{name}_ns"] for name in ("schedule_begin", "execute_begin", "execute_end")}
            requests = step["requests"]
            writer.writerow(
                (
                    step["step"],
                    (instants["schedule_begin"] - start_ns) / _NS_PER_S,
                    (instants["execute_end"] - instants["execute_begin"]) / _NS_PER_MS,
                    (instants["execute_begin"] - instants["schedule_begin"]) / _NS_PER_MS,
                    (step["update_end_ns"] - instants["execute_end"]) / _NS_PER_MS,
                    (instants["schedule_begin"] - updated_ns) / _NS_PER_MS,
                    sum(num for _, num, _ in requests),
                    len(requests),
                    step["num_decode_seqs"],
                    sum(num * before + num * (num + 1) // 2 for _, num, before in requests),
                    *(step[name] for name in state.values()),
                    step["num_preempted"],
                )
            )
            updated_ns = step["update_end_ns"]


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _write_lines(path: Path, lines: Iterator[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
