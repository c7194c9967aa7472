"""An OpenAI-compatible HTTP server around ``executor.engine``: a mock of a real deployment, or a small real one."""
