"""A headless Chromium driven through its DevTools protocol over a pair of pipes: no port, no package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EXECUTABLE = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE_S = 60.0
_TO_CHILD, _FROM_CHILD = 3, 4  # descriptors that Chromium reads commands from and writes answers to
_KEYS = {"Tab": 9, "Enter": 13, "End": 35, "ArrowLeft": 37, "ArrowRight": 39, " ": 32}


class Page:
    """One tab."""

    def __init__(self, write_fd: int, read_fd: int) -> None:
        self._write_fd, self._read_fd = write_fd, read_fd
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.problems: list[str] = []
        """What the page logged as errors, violations of its content security policy included."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to one command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self._number:
                assert "error" not in told, (method, told["error"])
                answer: dict[str, Any] = told["result"]
                return answer
            self._note(told)

    def _note(self, told: dict[str, Any]) -> None:
        method, parameters = told.get("method"), told.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(parameters["exceptionDetails"]))
        if method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(str(parameters["entry"]))

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read_fd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "Chromium does not answer"
            data = os.read(self._read_fd, 1 << 20)
            assert data, "Chromium has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        told: dict[str, Any] = json.loads(message)
        return told

    def look(self, width: int, height: int, *, is_phone: bool = False) -> None:
        """Set the size of the window; a phone has a finger for a mouse and shows two pixels for one."""
        scale = 2 if is_phone else 1
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=is_phone
        )
        self.send("Emulation.setTouchEmulationEnabled", enabled=is_phone)

    def open(self, url: str) -> None:
        """Go there; the page may still be loading."""
        self.send("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """What an expression comes to, awaited if it is a promise."""
        told = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def wait(self, condition: str, seconds: float = 30.0) -> None:
        """Until an expression counts as true; fails if that takes too long."""
        deadline = time.monotonic() + seconds
        while not self.run(f"(() => {{ try {{ return Boolean({condition}); }} catch {{ return false; }} }})()"):
            assert time.monotonic() < deadline, f"it never became true: {condition}; {self.problems}"
            time.sleep(0.02)

    def press(self, key: str, times: int = 1) -> None:
        """Press a key of the keyboard."""
        code = _KEYS[key]
        for _ in range(times):
            for kind in ("keyDown", "keyUp"):
                text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
                self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Save a screenshot, of the whole page or of what is in sight."""
        told = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(told["data"]))


@contextmanager
def page() -> Iterator[Page]:
    """A tab of a browser of its own, which ends with it."""
    assert EXECUTABLE is not None, "there is no Chromium"
    read_command, write_command = os.pipe()
    read_answer, write_answer = os.pipe()
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as folder:
        arguments = [
            *(EXECUTABLE, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--no-first-run", "--hide-scrollbars", f"--user-data-dir={folder}", "--remote-debugging-pipe"),
        ]
        command = f'exec {_TO_CHILD}<&{read_command} {_FROM_CHILD}>&{write_answer}; exec "$@"'
        browser = subprocess.Popen(
            ["bash", "-c", command, "bash", *arguments],
            pass_fds=(read_command, write_answer),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_command)
        os.close(write_answer)
        try:
            yield Page(write_command, read_answer)
        finally:
            os.close(write_command)
            os.close(read_answer)
            browser.terminate()
            browser.wait(timeout=20)
