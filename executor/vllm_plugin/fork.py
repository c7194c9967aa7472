"""Snapshots of a vLLM server that our scheduler serves: ask with a file, get a file, fork it with ``windtunnel fork``.

    vllm serve MODEL --scheduler-cls windtunnel.executor.vllm_plugin.fork.SnapshotScheduler \\
        --additional-config '{"windtunnel_snapshot": {"path": "/run/engine.json"}}'
    touch /run/engine.json.take     # engine.json is there after the next decision

Between two decisions the engine looks for the file at most every ``poll_s`` seconds; a snapshot is a copy of our
scheduler's state, and what turns it into JSON and writes it is another thread.  An idle engine decides nothing, so it
answers with the first request that comes.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from windtunnel.executor.vllm_plugin.engine import exact_ns
from windtunnel.executor.vllm_plugin.scheduler import VllmScheduler
from windtunnel.executor.vllm_plugin.section import Section
from windtunnel.sim.engine.request import Request
from windtunnel.sim.engine.snapshot import RecentRequest, Snapshot, take_snapshot, with_lengths
from windtunnel.sim.engine.snapshot_json import to_json

SECTION = Section("windtunnel_snapshot")
MOST_RECENT = 256

log = logging.getLogger("windtunnel.snapshot")


@dataclass(frozen=True, slots=True)
class SnapshotOptions:
    """What ``--additional-config '{"windtunnel_snapshot": {...}}'`` may say.

    Raises ValueError, naming the key, its value and the allowed range.
    """

    path: str
    """File that snapshots are written to; one is taken when ``path`` + ``.take`` is there."""
    poll_s: float = 0.05
    """How often to look for that file, in wall seconds."""

    def __post_init__(self) -> None:
        path: object = self.path
        poll_s: object = self.poll_s
        SECTION.check("path", path, isinstance(path, str) and path != "", "a path")
        is_number = isinstance(poll_s, int | float) and not isinstance(poll_s, bool)
        SECTION.check("poll_s", poll_s, is_number and 0 <= self.poll_s <= 60, "a number from 0 to 60")

    @classmethod
    def from_additional_config(cls, additional_config: Any) -> SnapshotOptions:
        """The options.  Raises ValueError for an unknown key and for a missing path."""
        given = SECTION.read(additional_config, [item.name for item in fields(cls)])
        if "path" not in given:
            raise ValueError(
                f'{SECTION.named("path")} is missing: add --additional-config \'{{"windtunnel_snapshot": '
                '{"path": "FILE"}}\''
            )
        return cls(**given)


class SnapshotScheduler(VllmScheduler):
    """VllmScheduler that takes a snapshot when it is asked to."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        options = SnapshotOptions.from_additional_config(vllm_config.additional_config)
        self._path = Path(options.path)
        self._asked = f"{options.path}.take"
        self._poll_s = options.poll_s
        self._look_at_s = 0.0
        self._recent: deque[tuple[Request, Any]] = deque(maxlen=MOST_RECENT)
        self._writer: threading.Thread | None = None

    def add_request(self, request: Any) -> None:
        """Queue a request; see VllmScheduler."""
        super().add_request(request)
        entry = self._entries.get(request.request_id)
        if entry is not None:
            self._recent.append((entry.ours, entry.theirs))

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Decide the next step; before that, take a snapshot if somebody asks for one."""
        now_s = time.monotonic()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + self._poll_s
            if os.path.exists(self._asked):
                self._give_snapshot()
        return super().schedule(throttle_prefills)

    def shutdown(self) -> None:
        """Wait for a snapshot that is being written."""
        if self._writer is not None:
            self._writer.join(timeout=10)
        super().shutdown()

    def snapshot(self) -> Snapshot:
        """The state between two decisions, all times on the wall clock."""
        begun_ns = time.time_ns()
        monotonic_to_wall_ns = begun_ns - time.monotonic_ns()
        plans = [step.plan for step in self._under_way if step.plan is not None]
        taken = take_snapshot(
            self.engine,
            exact_ns(begun_ns / 1e9),
            under_way=plans,
            recent=self._recent_requests(),
            are_lengths_known=False,
        )
        taken = with_lengths(taken, _known_lengths(self._entries))
        requests = [
            each._replace(
                scheduled_ns=_moved(each.scheduled_ns, monotonic_to_wall_ns),
                first_token_ns=_moved(each.first_token_ns, monotonic_to_wall_ns),
            )
            for each in taken.requests
        ]
        return replace(taken, requests=requests)

    def _give_snapshot(self) -> None:
        if self._writer is not None and self._writer.is_alive():
            return  # the one before is being written; the question stays
        try:
            os.unlink(self._asked)
            taken = self.snapshot()
        except Exception:
            log.exception("no snapshot could be taken")  # serving must go on
            return
        self._writer = threading.Thread(target=_write, args=(self._path, taken), name="windtunnel-snapshot")
        self._writer.start()

    def _recent_requests(self) -> list[RecentRequest]:
        size = self.engine.config.block_size
        return [_recent(ours, theirs, size) for ours, theirs in self._recent]


def _recent(ours: Request, theirs: Any, block_size: int) -> RecentRequest:
    """A request that came lately; only what ended by itself or by its limit says how long answers are."""
    reason = theirs.get_finished_reason()
    keys, is_complete = ours.keys, str(reason) in ("stop", "length")
    return RecentRequest(
        ours.arrival_ns,
        ours.num_prompt_tokens,
        ours.max_tokens,
        theirs.num_output_tokens if is_complete else None,
        ours.priority,
        () if keys is None else tuple(keys.between(0, ours.num_prompt_tokens // block_size)),
    )


def _known_lengths(entries: Mapping[str, Any]) -> dict[int | str, int]:
    """Lengths of answers that only their limit can end."""
    return {
        entry.ours.request_id: entry.ours.may_emit
        for entry in entries.values()
        if _ends_by_limit(entry.theirs.sampling_params)
    }


def _ends_by_limit(params: Any) -> bool:
    return bool(params.ignore_eos) and not params.stop and not params.stop_token_ids


def _moved(time_ns: int, by_ns: int) -> int:
    return time_ns if time_ns < 0 else time_ns + by_ns


def _write(path: Path, taken: Snapshot) -> None:
    """Put the file in place whole, or leave the old one."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(json.dumps(to_json(taken)), encoding="utf-8")
        os.replace(partial, path)
    except OSError:
        log.exception("the snapshot could not be written to %s", path)
