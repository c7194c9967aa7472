"""Which format a trace is in, told by what it contains, never by its name."""

from __future__ import annotations

import re
from typing import Literal

from windtunnel.scenarios.workloads import bench_serve, native, sharegpt
from windtunnel.scenarios.workloads.errors import TraceError
from windtunnel.scenarios.workloads.files import PathLike, header_cells, read_head, read_text

TraceFormat = Literal["azure", "mooncake", "burstgpt", "sharegpt", "vllm-bench", "windtunnel"]

FORMATS: tuple[TraceFormat, ...] = ("azure", "mooncake", "burstgpt", "sharegpt", "vllm-bench", "windtunnel")

_JSON_KEY = re.compile(r'"([A-Za-z0-9_ ]{1,40})"\s*:')

_ACCEPTED = (
    "accepted are Azure LLM CSV (TIMESTAMP,ContextTokens,GeneratedTokens), Mooncake JSON lines (timestamp, "
    "input_length, output_length, hash_ids), BurstGPT CSV (Timestamp,Request tokens,Response tokens), ShareGPT JSON "
    "with token counts, vllm bench serve results saved with --save-detailed, and windtunnel's own CSV or JSON lines "
    "(arrival_s,num_prompt_tokens,num_output_tokens)"
)


def detect_format(path: PathLike) -> TraceFormat:
    """The format of a trace file, by its header row or its JSON keys.

    Raises OSError; TraceError for an empty file and for one that looks like none of the formats.
    """
    head = read_head(path)
    start = head.lstrip()
    if not start:
        raise TraceError(path, None, "the file is empty: a trace needs at least one request")
    found = _json_format(start) if start[0] in "[{" else _csv_format(start)
    if found is None:
        read_text(path)  # says so if it is no text at all
        seen = list(_json_keys(start)) if start[0] in "[{" else header_cells(start)
        shown = ", ".join(seen[:12]) or start[:40]
        raise TraceError(path, 1, f"the format is not recognised (found {shown!r:.200}): {_ACCEPTED}")
    return found


def _json_keys(text: str) -> dict[str, None]:
    return dict.fromkeys(_JSON_KEY.findall(text))


def _json_format(text: str) -> TraceFormat | None:
    keys = _json_keys(text)
    if native.JSON_MARK in keys or ("num_prompt_tokens" in keys and any(name in keys for name in native.ARRIVALS)):
        return "windtunnel"
    if "conversations" in keys:
        return "sharegpt"
    if any(key in keys for key in bench_serve.KEYS):
        return "vllm-bench"
    if "timestamp" in keys and "input_length" in keys:
        return "mooncake"
    if any(key in keys for key in sharegpt.PROMPT_KEYS) and any(key in keys for key in sharegpt.OUTPUT_KEYS):
        return "sharegpt"
    return None


def _csv_format(text: str) -> TraceFormat | None:
    if text.startswith(native.CSV_MARK):
        return "windtunnel"
    names = {cell.lower() for cell in header_cells(text)}
    if "contexttokens" in names or "generatedtokens" in names:
        return "azure"
    if "request tokens" in names or "response tokens" in names:
        return "burstgpt"
    if any(name in names for name in (*native.ARRIVALS, "num_prompt_tokens", "num_output_tokens")):
        return "windtunnel"
    return None
