"""From a slider to the picture: how long the what-if page takes, in a headless Chromium on this machine.

Run from the repository's root, with Chromium installed:

    python -m benchmarks.ui_latency [REQUESTS]

Each row begins anew and moves one slider to the left by its keyboard, waits until the picture is there, and says what
of that the server took (from the question to the run's part of the answer), what the way took, and what plotly.js and
the browser took from there until two frames later.  A last line moves a slider faster than answers come.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
from typing import Any

from tests import chromium
from windtunnel.ui.app import PageSettings
from windtunnel.ui.question import presets
from windtunnel.ui.server import listen, make_server, url_of

MOVES = 10
SLIDERS = ("request_rate", "max_num_seqs", "gpu_memory_utilization", "output")
IDLE = "document.getElementById('result').getAttribute('aria-busy') === 'false'"


def main() -> None:
    """Print the table."""
    num_requests = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with listen("127.0.0.1", 0) as listener, chromium.page() as page:
        server = make_server(PageSettings(presets(None), "benchmark", 60.0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            _measure(page, f"{url_of(listener)}#preset=chat-8b-h100&num_requests={num_requests}", num_requests)
        finally:
            server.should_exit = True
            thread.join()


def _measure(page: chromium.Page, url: str, num_requests: int) -> None:
    page.look(1280, 900)
    print(f"{num_requests:,} requests; milliseconds, median (largest) of {MOVES} moves")
    print(f"{'slider':24}{'server':>16}{'way':>16}{'drawing':>16}{'in all':>16}")
    for name in SLIDERS:
        _begin(page, url)
        print(f"{name:24}" + "".join(f"{_shown(column):>16}" for column in zip(*_moved(page, name), strict=True)))
    _begin(page, url)
    print(_dragged(page))


def _begin(page: chromium.Page, url: str) -> None:
    page.open("about:blank")
    page.open(url)
    page.wait(f"windtunnelTimings.length && {IDLE}")


def _moved(page: chromium.Page, name: str) -> list[tuple[float, float, float, float]]:
    page.run(f"document.getElementById('knob-{name}').focus()")
    rows = []
    for _ in range(MOVES):
        before = page.run("windtunnelTimings.length")
        page.press("ArrowLeft")
        page.wait(f"windtunnelTimings.length > {before} && {IDLE}")
        last: dict[str, Any] = json.loads(page.run("JSON.stringify(windtunnelTimings.at(-1))"))
        way = last["received"] - last["input"] - last["server_ms"]
        rows.append((last["server_ms"], way, last["drawn"] - last["received"], last["drawn"] - last["input"]))
    return rows


def _dragged(page: chromium.Page) -> str:
    """A slider that is moved 40 times in a second: how many answers were drawn, and how long the last one took."""
    before = page.run("windtunnelTimings.length")
    page.run(
        "(async () => { const slider = document.getElementById('knob-request_rate');"
        " for (let k = 0; k < 40; k++) { slider.value = 10 + k % 20; slider.dispatchEvent(new Event('input'));"
        " await new Promise((done) => setTimeout(done, 25)); } })()"
    )
    page.wait(f"windtunnelTimings.length > {before} && {IDLE}")
    number = page.run("windtunnelTimings.length") - before
    last = json.loads(page.run("JSON.stringify(windtunnelTimings.at(-1))"))
    return f"dragged, 40 positions in a second: {number} pictures, the last {last['drawn'] - last['input']:.0f} ms old"


def _shown(values: tuple[float, ...]) -> str:
    return f"{statistics.median(values):.0f} ({max(values):.0f})"


if __name__ == "__main__":
    main()
