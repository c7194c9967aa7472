"""A streamed answer of OpenAI's interface, taken apart as its bytes come."""

from __future__ import annotations

import json
from typing import Any

from windtunnel.calibrate.live.observed import UNKNOWN

_MOST_ERROR_BYTES = 4000
_CONTENT_KEYS = ("content", "reasoning", "reasoning_content", "tool_calls")


class Answer:
    """Server-sent events of a completion or a chat: when which chunk brought how many tokens."""

    __slots__ = (
        "_buffer",
        "cached_tokens",
        "chunk_ns",
        "chunk_tokens",
        "error",
        "finish_reason",
        "num_tokens",
        "prompt_tokens",
        "saw_end",
        "token_ids",
        "usage_tokens",
    )

    def __init__(self) -> None:
        self._buffer = b""
        self.chunk_ns: list[int] = []
        """The clock at each chunk with tokens."""
        self.chunk_tokens: list[int] = []
        self.num_tokens = 0
        self.usage_tokens = self.prompt_tokens = self.cached_tokens = UNKNOWN
        """As the server counts them."""
        self.token_ids: list[int] = []
        self.finish_reason = ""
        self.error = ""
        self.saw_end = False

    def feed(self, at_ns: int, data: bytes) -> None:
        """Take in a part of the stream.  What is not as it should be goes to ``error``, and nothing after it counts."""
        self._buffer += data
        while not self.error and not self.saw_end and (event := self._next_event()) is not None:
            self._take_event(event, at_ns)

    def why_broken(self) -> str:
        """Why the answer, now that it is over, is no good; empty if it is."""
        if self.error:
            return self.error
        if not self.saw_end:
            left = self._buffer.strip()
            if not self.chunk_ns and left.startswith(b"{"):
                return f"the server did not stream: {error_text(left)}"
            return "the answer ended without [DONE]"
        return "" if self.chunk_ns else "the answer has no tokens"

    def _next_event(self) -> bytes | None:
        end, skip = self._buffer.find(b"\n\n"), 2
        if b"\r" in self._buffer:
            other = self._buffer.find(b"\r\n\r\n")
            if other >= 0 and (end < 0 or other < end):
                end, skip = other, 4
        if end < 0:
            return None
        event, self._buffer = self._buffer[:end], self._buffer[end + skip :]
        return event

    def _take_event(self, event: bytes, at_ns: int) -> None:
        for line in event.split(b"\n"):
            if not line.startswith(b"data:"):
                continue  # a comment, as servers send to keep a connection alive, or a field that says nothing here
            data = line[5:].strip()
            if data == b"[DONE]":
                self.saw_end = True
                return
            try:
                self._take(json.loads(data), at_ns)
            except (ValueError, TypeError, AttributeError, LookupError):
                self.error = f"not an event of a completion: {data[:120]!r}"
                return

    def _take(self, event: dict[str, Any], at_ns: int) -> None:
        if event.get("error") is not None:
            self.error = error_text(json.dumps(event).encode())
            return
        usage = event.get("usage")
        if usage:
            self._take_usage(usage)
        choices = event.get("choices")
        if choices:
            self._take_choice(choices[0], has_usage=bool(usage), at_ns=at_ns)

    def _take_usage(self, usage: dict[str, Any]) -> None:
        self.usage_tokens = int(usage["completion_tokens"])
        self.prompt_tokens = int(usage.get("prompt_tokens", UNKNOWN))
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if cached is not None:
            self.cached_tokens = int(cached)

    def _take_choice(self, choice: dict[str, Any], *, has_usage: bool, at_ns: int) -> None:
        ids = choice.get("token_ids")
        if ids:
            self.token_ids += ids
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if has_usage:
            tokens = self.usage_tokens - self.num_tokens
        elif ids is not None:
            tokens = len(ids)
        else:
            tokens = 1 if _has_content(choice) else 0
        if tokens > 0:
            self.num_tokens += tokens
            self.chunk_ns.append(at_ns)
            self.chunk_tokens.append(tokens)


def _has_content(choice: dict[str, Any]) -> bool:
    """Whether a chunk stands for a token: all of a completion's do, and not the one that opens a chat."""
    delta = choice.get("delta")
    return delta is None or any(delta.get(key) for key in _CONTENT_KEYS)


class ErrorBody:
    """The body of an answer with a status other than 200."""

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = b""

    def feed(self, data: bytes) -> None:
        """Take in a part; what is beyond the first few thousand bytes is dropped."""
        if len(self._data) < _MOST_ERROR_BYTES:
            self._data += data

    def __str__(self) -> str:
        return error_text(self._data)


def error_text(body: bytes) -> str:
    """The message in an error's JSON, else the beginning of what is there."""
    try:
        value = json.loads(body)
    except ValueError:
        return body[:300].decode("utf-8", "replace")
    if isinstance(value, dict):
        error = value.get("error") or value
        value = error.get("message", error) if isinstance(error, dict) else error
    return str(value)[:300]
