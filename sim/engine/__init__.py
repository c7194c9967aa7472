"""The serving engine without a clock: the same scheduler on a GPU and in simulation."""
