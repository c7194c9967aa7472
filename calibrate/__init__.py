"""Fitting what no formula gives to measurements: the memory of real start-ups (``memory_fit``).

Step times are not measured yet: cost models are uncalibrated, or profiles that somebody else made.
"""
