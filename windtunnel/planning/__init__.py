"""Capacity planning: the cheapest deployment that serves a workload within its objectives.

``plan`` answers; ``search`` looks, from what is cheap to know to what is not.
"""

from __future__ import annotations

from windtunnel.planning.plan import Plan, plan

__all__ = ["Plan", "plan"]
