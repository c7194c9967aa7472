"""Fitting what no formula gives: the memory of real start-ups (``memory_fit``), step times (``fit``).

Tables of step times come from others so far (``step_tables``, ``recorded_steps``); measuring them here is to come.
"""
