"""The simulated world: scheduler, KV cache, cost models, deployment, sources, records and metrics."""
