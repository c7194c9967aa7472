"""Memory for LoRA adapters, which vLLM sets aside when it loads the model."""

from __future__ import annotations

from collections import Counter

from windtunnel.sim.deployment.layers import Layer
from windtunnel.sim.deployment.model_spec import ModelSpec, layers_of_stage
from windtunnel.sim.deployment.weights import Split

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM 0.32 takes for max_lora_rank."""


def lora_bytes(
    model: ModelSpec,
    *,
    max_loras: int,
    max_lora_rank: int,
    split: Split,
    pipeline_parallel_size: int = 1,
    pipeline_rank: int = 0,
) -> int:
    """Bytes of the slots for ``max_loras`` adapters on one GPU.

    Every linear layer has a slot of rank * (inputs + outputs) elements in the model's dtype: of a layer that is split
    by outputs the inputs are whole and the other way round.  Embedding and lm_head, which are not split for adapters,
    have one each.  Source: ``lora/layers`` of vLLM 0.32, without fully_sharded_loras and with all modules targeted.
    """
    start, end = layers_of_stage(model.num_layers, pipeline_rank, pipeline_parallel_size)
    sides = sum(
        count * _sides(layer, model.hidden_size, split)
        for layer, count in Counter(model.decoder_layers[start:end]).items()
    )
    table = model.vocab_size + model.hidden_size
    sides += table * ((pipeline_rank == 0) + (pipeline_rank == pipeline_parallel_size - 1))
    return max_loras * max_lora_rank * sides * model.dtype_bytes


def _sides(layer: Layer, hidden_size: int, split: Split) -> int:
    """Inputs and outputs of all linear layers."""
    total = 0
    for parameter in layer.parameters(hidden_size):
        if parameter.linear and parameter.in_checkpoint:
            outputs, inputs, copies = parameter.local_shape(split)
            total += copies * (outputs + inputs)
    return total
