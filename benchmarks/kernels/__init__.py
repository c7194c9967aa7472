"""Each operation of ``executor.ops`` by itself: time, achieved bytes and FLOP a second.

A module has ``bench(bench: Bench) -> list[Row]`` and runs alone: ``python -m benchmarks.kernels.rms_norm``.
"""
