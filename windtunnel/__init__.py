"""windtunnel: a wind tunnel for LLM serving."""

__version__ = "0.1.0"
