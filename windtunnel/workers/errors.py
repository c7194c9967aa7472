"""What can go wrong with workers and stores, apart from what the jobs themselves raise."""

from __future__ import annotations


class WorkerDied(RuntimeError):
    """Processes end in the middle of a job, again and again, or while they start."""


class JobFailed(RuntimeError):
    """A job raised what cannot be carried from one process to another, or returned what is no plain data."""


class StoreError(RuntimeError):
    """A store cannot be read or written."""


class StoreInUse(StoreError):
    """Another process writes to the store."""


class BadRayAddress(ValueError):
    """The address of a Ray cluster does not read like one."""


class RayMissing(RuntimeError):
    """Ray was asked for and is not installed."""


class RayUnreachable(RuntimeError):
    """No Ray cluster answers, or its nodes have another windtunnel."""
