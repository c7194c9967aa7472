"""Conversations in ShareGPT's shape, with token counts instead of (or beside) their text.

A JSON list, or one JSON object after the other; each entry is one of

* ``{"id": …, "conversations": [{"from": "human", "num_tokens": 12}, {"from": "gpt", "num_tokens": 80}, …]}``: turns in
  turn, a human's before a model's.  ``num_tokens`` may also be called ``tokens``, ``token_count`` or ``length``; the
  speaker ``from`` or ``role``, and ``human`` or ``user``, ``gpt``, ``chatgpt``, ``assistant``, ``model`` or ``bot``;
  turns of ``system`` count into the first prompt.
* ``{"id": …, "prompt_tokens": 12, "output_tokens": 80}``: a single turn.  Other names for the first:
  ``num_prompt_tokens``, ``prompt_len``, ``input_tokens``, ``input_length``, ``input_len``; for the second:
  ``num_output_tokens``, ``completion_tokens``, ``output_length``, ``output_len``, ``response_tokens``.

The files have no times, so all requests are due at once.  Text is never counted: that would need the tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from windtunnel.scenarios.workloads.cells import MAX_TOKENS, number_of
from windtunnel.scenarios.workloads.errors import BadRows, OnBadRow, TraceError, brief
from windtunnel.scenarios.workloads.files import PathLike, json_values, read_text
from windtunnel.scenarios.workloads.rows import TraceRows
from windtunnel.sim.workload import Segment

PROMPT_KEYS = ("prompt_tokens", "num_prompt_tokens", "prompt_len", "input_tokens", "input_length", "input_len")
OUTPUT_KEYS = (
    "output_tokens",
    "num_output_tokens",
    "completion_tokens",
    "output_length",
    "output_len",
    "response_tokens",
)
_TURN_KEYS = ("num_tokens", "tokens", "token_count", "length")
_TEXT_KEYS = ("value", "content", "text")
_HUMAN = ("human", "user")
_MODEL = ("gpt", "chatgpt", "assistant", "model", "bot")

_NEEDS_COUNTS = (
    "this is ShareGPT text without token counts, and lengths in tokens cannot be known without the model's tokenizer: "
    'count them and write {"conversations": [{"from": "human", "num_tokens": 12}, {"from": "gpt", "num_tokens": 80}]} '
    'or {"prompt_tokens": 12, "output_tokens": 80} for each conversation'
)


@dataclass(frozen=True, slots=True)
class _Turn:
    user_tokens: int
    output_tokens: int


@dataclass(slots=True)
class _Rows:
    lines: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    previous: list[int] = field(default_factory=list)
    content: list[tuple[Segment, ...]] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)


def read(path: PathLike, *, on_bad_row: OnBadRow = "error", all_turns: bool = False) -> TraceRows:
    """The requests of a file of conversations; each conversation's first turn only, as ``vllm bench serve`` takes it.

    ``all_turns=True`` takes every turn: its prompt is all that was said before plus what the human adds, and it
    follows the turn before without a pause.  Raises OSError; TraceError for text without token counts, JSON that is
    none, or a bad conversation.
    """
    entries = list(json_values(path, read_text(path)))
    lines = [line for line, _ in entries]
    bad = BadRows(path, lines)
    conversations = [_turns(path, line, entry, row, bad) for row, (line, entry) in enumerate(entries)]
    keep, note = bad.settle(on_bad_row)
    kept = np.flatnonzero(keep).tolist()
    rows = _Rows()
    for stream, row in enumerate(kept):
        name = entries[row][1].get("id")
        label = f"entry {row + 1}" if name is None else str(name)
        _add(rows, conversations[row] if all_turns else conversations[row][:1], stream, lines[row], label)
    later = sum(len(conversations[row]) for row in kept) - len(rows.lines)
    return TraceRows(
        path,
        "sharegpt",
        np.array(rows.lines, np.int64),
        None,
        np.array(rows.prompt, np.int64),
        np.array(rows.output, np.int64),
        previous=np.array(rows.previous, np.int64),
        content=tuple(rows.content) if max(rows.previous, default=-1) >= 0 else None,
        num_streams=len(kept) if max(rows.previous, default=-1) >= 0 else 0,
        labels=tuple(rows.labels),
        notes=(
            *note,
            *((f"Took the first turn of each conversation; {later:,} later turns not used.",) if later else ()),
            "The file has no times: all requests are due at once.",
        ),
    )


def _add(rows: _Rows, turns: list[_Turn], stream: int, line: int, label: str) -> None:
    context = 0
    for number, turn in enumerate(turns):
        rows.previous.append(len(rows.lines) - 1 if number else -1)
        rows.lines.append(line)
        rows.prompt.append(context + turn.user_tokens)
        rows.output.append(turn.output_tokens)
        context += turn.user_tokens + turn.output_tokens
        rows.content.append(((stream, context),))
        rows.labels.append(label if len(turns) == 1 else f"{label} turn {number + 1}")


def _turns(path: PathLike, line: int, entry: Any, row: int, bad: BadRows) -> list[_Turn]:
    if not isinstance(entry, Mapping):
        bad.add(row, f"a conversation is a JSON object, this is {entry!r:.40}")
        return []
    try:
        turns = _spoken(entry["conversations"]) if "conversations" in entry else [_single(entry)]
    except _NoCounts:
        raise TraceError(path, line, _NEEDS_COUNTS) from None
    except ValueError as error:
        bad.add(row, str(error))
        return []
    if not turns:
        bad.add(row, "the conversation has no human turn that a model answers")
    return turns


class _NoCounts(Exception):
    """A turn has text but no count."""


def _single(entry: Mapping[str, Any]) -> _Turn:
    return _Turn(_count(entry, PROMPT_KEYS), _count(entry, OUTPUT_KEYS))


def _spoken(conversation: Any) -> list[_Turn]:
    if not isinstance(conversation, list) or not all(isinstance(turn, Mapping) for turn in conversation):
        raise ValueError("conversations is not a list of turns")
    turns: list[_Turn] = []
    waiting = 0
    asked = False
    for turn in conversation:
        speaker = str(turn.get("from", turn.get("role", ""))).lower()
        tokens = _count(turn, _TURN_KEYS)
        if speaker in _MODEL and asked:
            turns.append(_Turn(waiting, tokens))
            waiting, asked = 0, False
        elif speaker in _HUMAN or speaker == "system":
            waiting, asked = waiting + tokens, asked or speaker in _HUMAN
        else:
            raise ValueError(_out_of_turn(speaker))
    return turns


def _out_of_turn(speaker: str) -> str:
    if speaker in _MODEL:
        return "the model speaks before the human"
    return f"speaker is {brief(speaker)}, must be one of {', '.join((*_HUMAN, *_MODEL, 'system'))}"


def _count(entry: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    key = next((key for key in keys if key in entry), None)
    if key is None:
        if any(text in entry for text in _TEXT_KEYS) or "prompt" in entry:
            raise _NoCounts
        raise ValueError(f"there is none of {', '.join(keys)}")
    number, problem = number_of(entry[key])
    if not problem and not (number == int(number) and 1 <= number <= MAX_TOKENS):
        problem = f"is {brief(entry[key])}, must be a whole number of at least 1"
    if problem:
        raise ValueError(f"{key} {problem}")
    return int(number)
