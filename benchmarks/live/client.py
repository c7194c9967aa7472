"""The load client in a process and session of its own, so that it may have priority and nothing else holds it up."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple

from benchmarks.live import machine
from benchmarks.live.model import FIRST_WORD_ID, VOCAB_SIZE
from windtunnel.calibrate.live.client import ClientConfig, Progress, new_cache_salt, run_live
from windtunnel.calibrate.live.http import now_ns
from windtunnel.calibrate.live.observed import ObservedRun
from windtunnel.sim.workload import Workload


class Seen(NamedTuple):
    """A run as the client saw it."""

    observed: ObservedRun
    start_ns: int
    """Its begin on the monotonic clock, which the server's recorder reads, too."""
    priority: str


def run_client(load: Workload, url: str, model: str, on_progress: Callable[[Progress], None]) -> Seen:
    """Run the workload; raises RuntimeError if the client's process fails."""
    config = ClientConfig(url, model, token_ids=(FIRST_WORD_ID, VOCAB_SIZE), cache_salt=new_cache_salt())
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_work, args=(theirs, load, config), daemon=True)
    process.start()
    theirs.close()
    try:
        while True:
            got = ours.recv()
            if isinstance(got, Seen):
                return got
            on_progress(Progress(*got))
    except EOFError:
        process.join(10)
        raise RuntimeError(f"the client's process ended with {process.exitcode} before the run was over") from None
    finally:
        if process.is_alive():
            process.terminate()
        process.join(10)
        ours.close()


def _work(pipe: Connection, load: Workload, config: ClientConfig) -> None:
    os.setsid()
    priority = machine.prefer(os.getpid())
    machine.pin(os.getpid(), machine.cores()[1])
    start_ns = 1 << 63

    def tell(progress: Progress) -> None:
        nonlocal start_ns
        if progress.elapsed_s:  # each report names the start, later by what passed since it was made
            start_ns = min(start_ns, now_ns() - round(progress.elapsed_s * 1e9))
        pipe.send(tuple(progress))

    observed = run_live(load, config, on_progress=tell)
    pipe.send(Seen(observed, start_ns, priority))
    pipe.close()
