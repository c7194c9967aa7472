"""Measurements of speed; never run as tests."""
