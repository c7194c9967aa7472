"""What the load client costs and how well it keeps its times, against a server in another process.

The server is a bare loop that writes one event to every open stream at each step, as an engine does, and notes when it
wrote; both processes read the same clock.  Three things are measured: how late requests are sent, how long after the
server's write a token is stamped, and the client's CPU time a token.

    python -m benchmarks.live_client [--streams 50 200 500] [--step-ms 20] [--steps 200] [--rate 400]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt

from windtunnel.calibrate.live.client import ClientConfig, run_live
from windtunnel.calibrate.live.observed import ObservedRun
from windtunnel.sim.workload import workload

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class _Server:
    """Streams that get a token each at every step."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._streams: dict[int, tuple[asyncio.StreamWriter, int, int]] = {}
        self.written_ns: dict[int, list[int]] = {}

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                fields = dict(line.split(": ", 1) for line in head.strip().split("\r\n")[1:])
                body = json.loads(await reader.readexactly(int(fields.get("Content-Length", 0))) or b"{}")
                if not body:
                    answer = b'{"data": [{"id": "bench"}]}'
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(answer), answer))
                    continue
                writer.write(_HEAD)
                row = int(fields["X-Request-Id"].rpartition("-")[2])
                self.written_ns[row] = []
                self._streams[row] = (writer, 0, body["max_tokens"])
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def steps(self) -> None:
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            next_s = max(next_s + self._step_s, loop.time())
            await asyncio.sleep(next_s - loop.time())
            for row, (writer, done, wanted) in list(self._streams.items()):
                usage = {"prompt_tokens": 8, "completion_tokens": done + 1, "total_tokens": done + 9}
                choice = {"index": 0, "text": " token", "logprobs": None, "finish_reason": None, "stop_reason": None}
                about = {"id": f"cmpl-{row:032x}", "object": "text_completion", "created": 1_700_000_000}
                event = b"data: " + json.dumps({**about, "choices": [choice], "usage": usage}).encode() + b"\n\n"
                self.written_ns[row].append(time.perf_counter_ns())
                writer.write(b"%x\r\n%s\r\n" % (len(event), event))
                if done + 1 < wanted:
                    self._streams[row] = (writer, done + 1, wanted)
                else:
                    writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
                    del self._streams[row]


def _serve(pipe: Connection, step_s: float) -> None:
    async def main() -> None:
        made = _Server(step_s)
        server = await asyncio.start_server(made.talk, "127.0.0.1", 0, backlog=2048)
        pipe.send(server.sockets[0].getsockname()[1])
        stepping = asyncio.create_task(made.steps())
        await asyncio.to_thread(pipe.recv)
        stepping.cancel()
        pipe.send(made.written_ns)

    asyncio.run(main())


def _measure(num_streams: int, step_s: float, num_steps: int, rate_per_s: float) -> str:
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs, step_s))
    server.start()
    config = ClientConfig(f"http://127.0.0.1:{ours.recv()}", num_warmup_requests=0, scrape_interval_s=0)
    gaps_s = np.random.default_rng(0).exponential(1 / rate_per_s, num_streams)
    due_ns = (np.cumsum(gaps_s) * 1e9).astype(np.int64)
    load = workload(due_ns, np.full(num_streams, 64), np.full(num_streams, num_steps))
    cpu_s, start_s = time.process_time(), time.perf_counter()
    run = run_live(load, config)
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - start_s
    ours.send(None)
    late_ns = _stamped_late_ns(run, ours.recv())
    server.join()
    assert bool(run.requests.is_finished.all()), run.requests.errors
    assert run.send_report is not None
    num_tokens = len(run.requests.chunk_ns)
    report = run.send_report
    cells = [
        f"{num_streams:7,}",
        f"{num_tokens:9,}",
        f"{num_tokens / wall_s:9,.0f}",
        f"{cpu_s / num_tokens * 1e6:9.1f}",
        f"{100 * cpu_s / wall_s:6.0f}",
        *(f"{np.percentile(late_ns, percent) / 1e6:8.2f}" for percent in (50, 99)),
        *(f"{value * 1e3:8.2f}" for value in (report.late_p50_s, report.late_p99_s, report.late_max_s)),
    ]
    return " ".join(cells)


def _stamped_late_ns(run: ObservedRun, written_ns: dict[int, list[int]]) -> npt.NDArray[np.int64]:
    """Stamp minus write, up to one constant for the run's start, which the smallest of all takes away."""
    table = run.requests
    parts = [
        table.send_ns[row] + table.chunk_times_of(row) - np.array(written_ns[row], np.int64)
        for row in range(len(table))
    ]
    late: npt.NDArray[np.int64] = np.concatenate(parts)
    return late - int(late.min())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[50, 200, 500])
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=400.0)
    given = parser.parse_args()
    print("streams    tokens  tokens/s  CPU us/tk   CPU% stamp50 stamp99   send50  send99  sendmax  (ms)")
    for num_streams in given.streams:
        print(_measure(num_streams, given.step_ms / 1e3, given.steps, given.rate), flush=True)


if __name__ == "__main__":
    main()
