"""Results that exist already, as observed runs: of ``vllm bench serve``, guidellm, aiperf, genai-perf and LLMPerf.

Which format a file has is seen from what is in it.  What a file does not say stays unknown; what had to be decided
is in the run's notes.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from windtunnel.calibrate.live import imports_aiperf, imports_guidellm, imports_table, imports_vllm
from windtunnel.calibrate.live.observed import ObservedRun
from windtunnel.calibrate.live.observed_file import KIND, load_observed
from windtunnel.calibrate.live.reading import Place, UnreadableResult

_Reader = Callable[[Place, Mapping[str, Any]], list[ObservedRun]]
_FORMATS: tuple[tuple[Callable[[Mapping[str, Any]], bool], _Reader], ...] = (
    (imports_guidellm.looks_like, imports_guidellm.read),
    (imports_aiperf.looks_like_summary, imports_aiperf.read_summary),
    (imports_vllm.looks_like, imports_vllm.read),
)
_SPACE = re.compile(r"\s*")


def read_results(path: Path) -> list[ObservedRun]:
    """All runs in a file, gzip or not: one for most tools, several for ``--append-result`` and guidellm's sweeps.

    Raises OSError, and UnreadableResult (a ValueError) that names the file and the place for what cannot be read.
    """
    text = _text(path)
    place = Place(str(path))
    if not text.strip():
        raise place.wrong("the file is empty: give the result of a load generator")
    if text.lstrip()[0] not in "{[":
        return [imports_table.read(place, text)]
    values = _json_values(place, text)
    first_place, first = values[0]
    if isinstance(first, dict) and first.get("kind") == KIND:
        return [load_observed(path)]
    if imports_aiperf.looks_like_records(first):
        return [imports_aiperf.read_records(place, values)]
    runs: list[ObservedRun] = []
    for where, value in values:
        if imports_table.looks_like(value):
            runs.append(imports_table.read_rows(where, value))
        else:
            for given in value if isinstance(value, list) else [value]:
                runs += _reader(where, given)(where, given)
    if not runs:
        raise first_place.wrong("no run is in it")
    return runs


def read_result(path: Path, *, run: int | None = None) -> ObservedRun:
    """One run of a file; ``run`` (from 0) chooses among several.

    Raises as ``read_results``; UnreadableResult too if there are several and none is chosen, or no such run.
    """
    runs = read_results(path)
    if run is None and len(runs) > 1:
        listed = "; ".join(f"{number}: {each.name}" for number, each in enumerate(runs[:8]))
        raise UnreadableResult(f"{path}: {len(runs)} runs are in it, choose one by its number: {listed}")
    chosen = 0 if run is None else run
    if not 0 <= chosen < len(runs):
        raise UnreadableResult(f"{path}: there is no run {chosen}, the file holds runs 0 to {len(runs) - 1}")
    return runs[chosen]


def _reader(place: Place, value: Any) -> _Reader:
    if isinstance(value, dict):
        for looks_like, read in _FORMATS:
            if looks_like(value):
                return read
        keys = ", ".join(list(value)[:8])
        raise place.wrong(
            f"not a result that is known here (keys: {keys}); known are the JSON of vllm bench serve --save-result, "
            "guidellm, aiperf and genai-perf, and tables with a request a row"
        )
    raise place.wrong(f"a result is a JSON object, this is {str(value)[:40]!r}")


def _text(path: Path) -> str:
    data = path.read_bytes()
    if data.startswith(b"\x1f\x8b"):
        try:
            data = gzip.decompress(data)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UnreadableResult(f"{path}: the gzip data is damaged ({error}): fetch the file again") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UnreadableResult(
            f"{path}:{line}: not UTF-8 text (byte {data[error.start]:#04x}): save it as UTF-8"
        ) from None


def _json_values(place: Place, text: str) -> list[tuple[Place, Any]]:
    """One JSON value, or one after the other (``--append-result``, JSON lines), each with its place."""
    decoder = json.JSONDecoder()
    values: list[tuple[Place, Any]] = []
    at, line = 0, 1
    while at < len(text):
        blank = _SPACE.match(text, at)
        start = blank.end() if blank else at
        if start >= len(text):
            break
        line += text.count("\n", at, start)
        try:
            value, end = decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            raise place.at_line(line + error.lineno - 1 - text.count("\n", 0, start)).wrong(
                f"not JSON ({error.msg}): the file is damaged or cut off"
            ) from None
        except RecursionError:
            raise place.at_line(line).wrong("the JSON is nested too deeply") from None
        values.append((place.at_line(line), value))
        line += text.count("\n", start, end)
        at = end
    return values
