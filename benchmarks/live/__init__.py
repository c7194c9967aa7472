"""Parts of ``benchmarks.live_vllm_cpu``: a real vLLM server on the CPU, a load on it, and what was recorded of both."""
