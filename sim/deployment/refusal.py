"""Settings that vLLM itself refuses."""

from __future__ import annotations


class RefusedByVllm(ValueError):
    """vLLM would not start with these settings, be there as much memory as there may.

    Each value alone is one that some release, model or card takes: a split that this model does not allow, an option
    that this release lacks, two limits that contradict each other.  A value that no release takes is a plain
    ValueError.
    """
