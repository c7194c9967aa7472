"""What computes steps: a small real engine (torch on a CPU, Triton on a GPU), its server, and plug-ins for a real vLLM.

Importing this package imports neither torch nor triton.
"""
