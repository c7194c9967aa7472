"""Options that several commands have in the same words; a command says under which heading it has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from windtunnel.cli.panels import flag

Option = Callable[[str], Any]
"""Makes the option of a command, given its heading."""


def _shared(*names: str, help: str, **more: Any) -> Option:  # noqa: A002 -- typer's word
    return lambda panel: flag(panel, *names, help=help, **more)


def scenario_argument(help: str = "A scenario file, or the name of a bundled one.") -> Any:  # noqa: A002 -- typer's word
    """The scenario that a command is about."""
    return typer.Argument(metavar="SCENARIO", help=help, show_default=False)


def run_folder_argument() -> Any:
    """The saved run that a command is about."""
    return typer.Argument(metavar="RUN_DIR", help="What windtunnel simulate -o wrote.", show_default=False)


# --- deployment and engine: names and meaning are those of vllm serve

model = _shared("--model", metavar="NAME|PATH", help="Bundled model (windtunnel models), or a config.json.")
dtype = _shared("--dtype", metavar="TYPE", help="Type of the weights.")
kv_cache_dtype = _shared("--kv-cache-dtype", metavar="TYPE", help="Type of the KV cache, such as fp8.")
gpu_memory_utilization = _shared("--gpu-memory-utilization", metavar="SHARE", help="Share of the GPU's memory to use.")
num_gpu_blocks_override = _shared("--num-gpu-blocks-override", metavar="N", help="KV blocks, whatever the memory.")
kv_cache_memory_bytes = _shared("--kv-cache-memory-bytes", metavar="SIZE", help="Memory for the KV cache: 16GiB, 16GB.")
max_num_seqs = _shared("--max-num-seqs", metavar="N", help="Most requests that run at once.")
max_num_batched_tokens = _shared("--max-num-batched-tokens", metavar="N", help="Token budget of a step: 8192, 16k.")
block_size = _shared("--block-size", metavar="N", help="Tokens in a KV block.")
enable_chunked_prefill = _shared(
    "--enable-chunked-prefill/--no-enable-chunked-prefill", help="Split long prompts over steps."
)
enable_prefix_caching = _shared(
    "--enable-prefix-caching/--no-enable-prefix-caching", help="Reuse the KV blocks of prefixes."
)
long_prefill_token_threshold = _shared(
    "--long-prefill-token-threshold", metavar="N", help="Longest chunk while others are there."
)
scheduling_policy = _shared("--scheduling-policy", metavar="fcfs|priority", help="Order of the waiting requests.")

# --- workload

trace = _shared("--trace", metavar="FILE", help="Replay the requests of this file.")
trace_format = _shared("--format", metavar="NAME", help="Format of the trace, if not to be recognised.")
on_bad_row = _shared("--on-bad-row", metavar="error|skip", help="What to do with a row that is wrong.")
duration = _shared("--duration", metavar="TIME", help="Take so much of the trace.")
limit = _shared("--limit", metavar="N", help="Take at most so many requests of the trace.")
num_prompts = _shared("--num-prompts", metavar="N", help="Number of synthetic requests.")
input_len = _shared("--input-len", metavar="DIST", help="Prompt tokens of a request.")
output_len = _shared("--output-len", metavar="DIST", help="Output tokens of a request.")
burstiness = _shared("--burstiness", metavar="B", help="1 Poisson, below burstier, inf constant.")
arrival = _shared("--arrival", metavar="PROCESS", help="Arrivals, in place of these two.")

# --- what is wanted

slo = _shared("--slo", metavar="'ttft:p99<500ms'", help="An objective, in place of the scenario's; repeat it.")
goodput = _shared("--goodput", metavar="'ttft:500'", help="A limit on each request in ms; repeat it.")
cost = _shared("--cost", metavar="COST", help="What a step costs.")
currency = _shared("--currency", metavar="WORD", help="What prices are in, if not USD.")

# --- how it is done

seed = _shared("--seed", metavar="N", min=0, help="Seed of all randomness.")
first_seed = _shared("--seed", metavar="N", min=0, help="The first seed.")
scenario_seed = _shared("--seed", metavar="N", help="All randomness follows from it.")
jobs = _shared("--jobs", "-j", metavar="N", min=1, help="Processes that share the work: all CPUs; same results.")
ray = _shared("--ray", metavar="auto|ADDRESS|local:N", help="Let a Ray cluster do the work; same results.")

# --- what is written and printed

as_json = _shared("--json", help="Print JSON.")
json_for_table = _shared("--json", help="Print JSON in place of the table.")
json_for_text = _shared("--json", help="Print JSON in place of the text.")
markdown_for_table = _shared("--markdown", help="Print Markdown in place of the table.")
markdown_for_text = _shared("--markdown", help="Print Markdown in place of the text.")
html_file = _shared("--html", metavar="FILE", help="Write one self-contained HTML file.")
html_report = _shared("--html", metavar="FILE", help="Write a report that a browser shows, offline too.")
csv_of_runs = _shared("--csv", metavar="FILE", help="Write one row a run with all of its numbers.")
parquet = _shared("--parquet", metavar="FILE", help="The same as Parquet.")
kept_in = _shared(
    "--output",
    "-o",
    metavar="DIR",
    help="Keep each run there as soon as it is finished; in the end all tables and reports, too.",
)
force = _shared("--force", help="Write into DIR even if it holds other things.")
force_scenario = _shared("--force", help="Let --save-scenario write over a file that is no scenario.")
quiet = _shared("--quiet", "-q", help="No progress and no remarks on stderr.")
