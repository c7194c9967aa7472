"""Scenarios: what is asked of which deployment, read strictly and resolved with the source of every value."""
