"""What runs on what: model, GPU, engine arguments and the memory that is left for the KV cache."""
