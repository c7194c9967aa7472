"""Measuring and fitting cost models.  Nothing is here yet: this release has uncalibrated cost models only."""
