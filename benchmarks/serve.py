"""The server under many short requests: requests per second, processor time, and whether its memory stays flat.

    python -m benchmarks.serve [NUM_REQUESTS]

Starts ``windtunnel serve`` with a simulated executor that is as fast as the host allows, sends requests over 64
connections, and prints processor time and resident memory of the server's process after each tenth of them (Linux).
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx

NUM_CONNECTIONS = 64
COMMAND = [
    *(sys.executable, "-m", "windtunnel", "serve", "--port", "0", "--cost", "constant:step_s=10ms"),
    *("--speed", "1e6", "--num-gpu-blocks-override", "4096", "--max-model-len", "4096", "--disable-uvicorn-access-log"),
]


def resident_mib(pid: int) -> float:
    """Resident memory of a process in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    match = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert match is not None
    return int(match[1]) / 1024


def cpu_s(pid: int) -> float:
    """Processor time that a process has used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def send(client: httpx.AsyncClient, count: int, rng: random.Random) -> None:
    """Send ``count`` requests of 64 to 512 prompt tokens and 16 output tokens, as many at once as there are
    connections."""
    bodies = iter(
        [{"prompt": [rng.randrange(30_000)] * rng.randrange(64, 512), "max_tokens": 16} for _ in range(count)]
    )

    async def work() -> None:
        for body in bodies:
            answer = await client.post("/v1/completions", json=body)
            answer.raise_for_status()

    await asyncio.gather(*(work() for _ in range(NUM_CONNECTIONS)))


async def measure(url: str, pid: int, num_requests: int) -> None:
    """Print a line for each tenth of the requests."""
    rng, part = random.Random(0), num_requests // 10
    limits = httpx.Limits(
        max_connections=NUM_CONNECTIONS, keepalive_expiry=2.0
    )  # the server closes idle ones after 5 s
    async with httpx.AsyncClient(base_url=url, timeout=120.0, limits=limits) as client:
        print(f"{'requests':>10} {'requests/s':>12} {'CPU ms/request':>16} {'resident MiB':>14}")
        for number in range(1, 11):
            begin_s, used_s = time.perf_counter(), cpu_s(pid)
            await send(client, part, rng)
            rate = part / (time.perf_counter() - begin_s)
            cpu_ms = (cpu_s(pid) - used_s) / part * 1e3
            print(f"{number * part:>10,} {rate:>12,.0f} {cpu_ms:>16.2f} {resident_mib(pid):>14.1f}", flush=True)


def main() -> None:
    """Start the server, measure, and stop it."""
    num_requests = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    with subprocess.Popen(COMMAND, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        url = next(m[1] for line in server.stderr if (m := re.search(r"API server on (http\S+)", line)))
        try:
            asyncio.run(measure(url, server.pid, num_requests))
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
