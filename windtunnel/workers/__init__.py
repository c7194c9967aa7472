"""Many jobs, done in this process, in local processes or on a Ray cluster, with the same results whoever does them.

The engine knows nothing of simulation: a ``Job`` names a function and its argument, ``Workers`` does jobs and hands out
their results in the jobs' own order, a ``Store`` keeps them on disk, and ``Progress`` says how far it is.
"""

from __future__ import annotations

from windtunnel.workers.errors import (
    BadRayAddress,
    JobFailed,
    RayMissing,
    RayUnreachable,
    StoreError,
    StoreInUse,
    WorkerDied,
)
from windtunnel.workers.jobs import Done, Job, canonical_json, content_version
from windtunnel.workers.machine import usable_cpus
from windtunnel.workers.progress import Progress
from windtunnel.workers.store import Store
from windtunnel.workers.workers import Workers

__all__ = [
    "BadRayAddress",
    "Done",
    "Job",
    "JobFailed",
    "Progress",
    "RayMissing",
    "RayUnreachable",
    "Store",
    "StoreError",
    "StoreInUse",
    "WorkerDied",
    "Workers",
    "canonical_json",
    "content_version",
    "usable_cpus",
]
