"""Real executors (torch, Triton).  None is here yet: this release simulates only."""
