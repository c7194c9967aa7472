"""Executors beside the simulated one of ``sim``: plug-ins for a real vLLM (``vllm_plugin``).

Those that compute a model (torch, Triton) are not here yet.
"""
