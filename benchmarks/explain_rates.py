"""How often ``explain`` is right: planted causes found first, and healthy runs called so, over many random runs.

    python benchmarks/explain_rates.py [--variants 25] [--healthy 150] [--only seats,budget]

Prints a table and, for each miss, the seed and what was said instead.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from explain_cases import PLANTED, healthy

from windtunnel.calibrate.explain import explain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", type=int, default=25)
    parser.add_argument("--healthy", type=int, default=150)
    parser.add_argument("--only", default="", help="Kinds, separated by commas.")
    parser.add_argument("--first-seed", type=int, default=0)
    asked = parser.parse_args()
    wanted = asked.only.split(",") if asked.only else list(PLANTED)
    print(f"{'planted':16} {'first':>9} {'found':>9}")
    for kind in wanted:
        first = anywhere = 0
        began = time.perf_counter()
        misses = []
        for seed in range(asked.first_seed, asked.first_seed + asked.variants):
            case = PLANTED[kind](seed)
            said = [finding.kind for finding in explain(case.run, case.facts).findings]
            first += said[:1] == [case.kind]
            anywhere += case.kind in said
            if said[:1] != [case.kind]:
                misses.append(f"    seed {seed}: {', '.join(said) or 'no fault found'}")
        took = f"{time.perf_counter() - began:.1f} s"
        print(
            f"{kind:16} {first:>4}/{asked.variants:<4} {anywhere:>4}/{asked.variants:<4} {took}",
            *misses,
            sep="\n",
            flush=True,
        )
    wrong = 0
    for seed in range(asked.first_seed, asked.first_seed + asked.healthy):
        findings = explain(healthy(seed).run).findings
        wrong += bool(findings)
        for finding in findings[:1]:
            print(f"    healthy seed {seed}: {finding.kind}: {finding.sentence}")
    print(f"healthy          {asked.healthy - wrong}/{asked.healthy} without a finding")


if __name__ == "__main__":
    main()
