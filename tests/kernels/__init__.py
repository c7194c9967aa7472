"""Triton kernels against float64, in the interpreter where there is no GPU, and compiled ahead of time."""
