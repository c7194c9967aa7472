"""Results on disk by the keys of their jobs: append-only, safe against crashes, for one writer at a time.

``results.jsonl`` begins with a line that names the format; then each line is one result with its key and a checksum.
What a crash or a full disk leaves of a line is cut off before the next one is written.
"""

from __future__ import annotations

import json
import os
import re
import time
import zlib
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from windtunnel.workers.errors import StoreError, StoreInUse
from windtunnel.workers.jobs import content_version

RESULTS_FILE, LOCK_FILE = "results.jsonl", "lock"
_FIRST_LINE = b'{"windtunnel_results":1}\n'
_LINE = re.compile(rb'\{"key":"([0-9a-f]{64})","content":"([0-9a-f]{16})","crc32":"([0-9a-f]{8})","kept":(.*)\}\n')
_SYNC_EVERY_S = 1.0


class Store:
    """Results of jobs in a folder, which is made if it is missing.

    A result is there again for every job with the same key, so under the same code, data and arguments; others stay in
    the file unused.  A result that was put is not lost when the process dies; one put within the last second may be if
    the machine does.

    Raises StoreInUse if another process has it open, StoreError if the folder cannot be written or has something else
    in its place.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.num_damaged = 0
        """Lines that were found unreadable, and whose jobs will be done again."""
        self.num_outdated = 0
        """Results that another version of code or data left there."""
        self._places: dict[str, tuple[int, int]] = {}  # of the kept text, by key: start and length
        self._synced_s = time.monotonic()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.folder / LOCK_FILE)
        except OSError as error:
            raise StoreError(f"cannot keep results in {self.folder}: {error.strerror or error}") from error
        try:
            self._file = os.open(self.folder / RESULTS_FILE, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
            self._size = self._read()
        except OSError as error:
            os.close(self._lock)
            raise StoreError(f"cannot keep results in {self.folder}: {error.strerror or error}") from error
        except StoreError:
            os.close(self._lock)
            raise

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def get(self, key: str) -> Any:
        """The result of the job with that key.  Raises KeyError if there is none, StoreError if it is gone."""
        return json.loads(self.text(key))

    def text(self, key: str) -> str:
        """As ``get``, as the JSON that was put."""
        start, length = self._places[key]
        try:
            os.lseek(self._file, start, os.SEEK_SET)
            kept = _read_all(self._file, length)
        except OSError as error:
            raise StoreError(f"cannot read the results in {self.folder}: {error.strerror or error}") from error
        if len(kept) < length:
            raise StoreError(f"the results in {self.folder} were cut off by somebody else: delete it, or start anew")
        return kept.decode("ascii")

    def put(self, key: str, text: str) -> None:
        """Keep the JSON of a result.  Raises StoreError if there is no room; what was kept before stays."""
        if key in self._places:
            return
        kept = text.encode("ascii")
        head = f'{{"key":"{key}","content":"{content_version()[:16]}","crc32":"{zlib.crc32(kept):08x}","kept":'
        line = b"".join((head.encode("ascii"), kept, b"}\n"))
        try:
            self._append(line)
        except OSError as error:
            raise StoreError(
                f"cannot keep a result in {self.folder}: {error.strerror or error}; {len(self):,} results are safe "
                "there, and the same command goes on from them"
            ) from error
        self._places[key] = self._size - len(kept) - 2, len(kept)

    def close(self) -> None:
        """Give the folder free for others."""
        if self._file < 0:
            return
        with suppress(OSError):
            os.fsync(self._file)
        os.close(self._file)
        os.close(self._lock)
        self._file = self._lock = -1

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, line: bytes) -> None:
        """All of it or, after an exception, nothing."""
        try:
            os.lseek(self._file, self._size, os.SEEK_SET)
            left = memoryview(line)
            while left:
                left = left[os.write(self._file, left) :]
        except BaseException:
            with suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(line)
        now_s = time.monotonic()
        if now_s - self._synced_s >= _SYNC_EVERY_S:
            self._synced_s = now_s
            os.fsync(self._file)

    def _read(self) -> int:
        """Find the results; the size of the file once what a crash left behind its last whole line is cut off."""
        size = os.fstat(self._file).st_size
        content = content_version()[:16].encode("ascii")
        with open(self._file, "rb", closefd=False) as file:
            first = file.readline()
            if first != _FIRST_LINE and not _FIRST_LINE.startswith(first):
                raise StoreError(
                    f"{self.folder / RESULTS_FILE} holds no results of this version of windtunnel: name another folder"
                )
            end = len(first)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._note(line, end, content)
                end += len(line)
        if first != _FIRST_LINE:
            os.ftruncate(self._file, 0)
            self._size = 0
            self._append(_FIRST_LINE)
            return len(_FIRST_LINE)
        if end < size:
            os.ftruncate(self._file, end)
        return end

    def _note(self, line: bytes, start: int, content: bytes) -> None:
        found = _LINE.fullmatch(line)
        if found is None or zlib.crc32(found[4]) != int(found[3], 16):
            self.num_damaged += 1
        elif found[2] != content:
            self.num_outdated += 1
        else:
            self._places[found[1].decode("ascii")] = start + found.start(4), len(found[4])


def _read_all(file: int, length: int) -> bytes:
    parts = []
    while length > 0 and (part := os.read(file, length)):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _locked(path: Path) -> int:
    """The open lock file, whose lock ends with this process at the latest; the number of its holder is in it."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _take(lock)
    except BlockingIOError:
        holder = _holder(lock)
        os.close(lock)
        raise StoreInUse(
            f"another windtunnel{f' (process {holder})' if holder else ''} is writing to {path.parent}: wait until it "
            "ends, or name another folder"
        ) from None
    except OSError:
        os.close(lock)
        raise
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode("ascii"))
    return lock


def _holder(lock: int) -> str:
    with suppress(OSError):  # Windows lets nobody else read it
        return os.read(lock, 20).decode("ascii", "replace").strip()
    return ""


def _take(lock: int) -> None:
    """Raises BlockingIOError if another process has it."""
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        try:
            msvcrt.locking(lock, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
        except OSError as error:
            raise BlockingIOError from error
        return
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
