"""The messages in a log, without what terminals, containers and log collectors put around them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class Process(NamedTuple):
    """Who wrote a line, as it is prefixed; empty for a bare line."""

    label: str
    pid: str


_ANSI = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])"  # as sent to a terminal
    r"|(?:\^\[|#033|\\x1b|\\u001b|\\033)?\[\d{1,3}(?:;\d{1,3})*m"  # with the escape lost or spelled out
)
_CONTAINER = re.compile(r"\[pod/([^\]\s]{1,200})\] |([A-Za-z0-9][\w.-]{0,100}) +\| ")
_MESSAGE_KEYS = ("log", "message", "msg", "textPayload", "jsonPayload", "MESSAGE", "line", "body", "_raw")


def messages(text: str | Iterable[str], anchors: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """Line number, container and message of each line that may matter; one JSON line may hold several messages."""
    number = 0
    for chunk, matters in _chunks(text, anchors):
        if not matters:
            number += chunk.removesuffix("\n").count("\n") + 1
            continue
        for line in chunk.removesuffix("\n").split("\n"):
            number += 1
            plain = _plain(line)
            prefix = _CONTAINER.match(plain)
            container = (prefix[1] or prefix[2]) if prefix else ""
            for message in _unwrapped(plain[prefix.end() :] if prefix else plain):
                yield number, container, message


_LARGE, _SMALL = 2**16, 2**11
"""Characters that are looked through at once for a text that matters, and where there is one, at once again."""


def _chunks(text: str | Iterable[str], anchors: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Whole lines, and whether one of them may matter: most of a long log does not, and is not looked at by line."""
    for given in (text,) if isinstance(text, str) else text:
        for large in _cut(given, _LARGE):
            if not _may_matter(large, anchors):
                yield large, False
                continue
            for small in _cut(large, _SMALL):
                yield small, _may_matter(small, anchors)


def _cut(text: str, size: int) -> Iterator[str]:
    start = 0
    if not text:
        yield text
    while start < len(text):
        end = text.find("\n", start + size)
        end = len(text) if end < 0 else end + 1
        yield text[start:end]
        start = end


def _may_matter(chunk: str, anchors: Sequence[str]) -> bool:
    """Whether it holds a text that some rule looks for, or colours, which may stand within such a text."""
    return any(text in chunk for text in anchors)


def _plain(line: str) -> str:
    if "[" in line:
        line = _ANSI.sub("", line)
    return line.replace("\r", " ")


def _unwrapped(line: str, depth: int = 0) -> Iterator[str]:
    start = line.find('{"')
    if start < 0 or depth > 3 or not line.rstrip().endswith("}"):
        yield line
        return
    try:
        record = json.loads(line[start:])
    except (ValueError, RecursionError):
        record = None
    message = _message_of(record)
    if message is None:
        yield line
        return
    for part in message.split("\n"):
        yield from _unwrapped(line[:start] + _process_of(record) + _plain(part), depth + 1)


def _message_of(record: object) -> str | None:
    if not isinstance(record, dict):
        return None
    for key in _MESSAGE_KEYS:
        value = record.get(key)
        if isinstance(value, dict):
            value = value.get("message")
        if isinstance(value, str):
            return value
    return None


def _process_of(record: Mapping[str, Any]) -> str:
    """The process that vLLM's own JSON logging names in fields of their own, as it prefixes other lines."""
    process = record.get("vllm_process_name") or record.get("processName")
    if not isinstance(process, str) or not process.isidentifier() or process == "MainProcess":
        return ""
    return f"({process} pid={record.get('process', 0)}) "


_PROCESS = re.compile(
    r"\(([A-Za-z]\w{0,60})(?: (rank=\d{1,6}))? pid=(\d{1,10})(?:, ip=[^)]{1,60})?\)|\[(rank\d{1,6})\]:"
)


def process_before(text: str, end: int) -> Process:
    """The last process prefix before a message; a progress bar without line end may stand before it."""
    prefixes = list(_PROCESS.finditer(text, 0, end))
    if not prefixes:
        return Process("", "")
    name, rank, pid, torch_rank = prefixes[-1].groups()
    if torch_rank:
        return Process(torch_rank, "")
    return Process(f"{name} {rank}" if rank else name, pid)


def has_digit(label: str) -> bool:
    """Whether the name of a process has its rank in it."""
    return any(character.isdigit() for character in label)
