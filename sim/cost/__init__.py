"""Cost models: seconds for a step of a given shape."""
