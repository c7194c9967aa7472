"""Values of the vLLM production-stack chart.

Source: ``helm/templates/deployment-vllm-multi.yaml`` of vllm-project/production-stack: which flag each key of
``vllmConfig`` becomes, that ``extraArgs`` come behind them, and that prefix caching is switched off wherever
``vllmConfig`` does not switch it on, against vLLM's own default.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from windtunnel.scenarios.deployments.arguments import SERVE, read_arguments
from windtunnel.scenarios.deployments.containers import item_words
from windtunnel.scenarios.deployments.kubernetes import gpu_of_terms
from windtunnel.scenarios.deployments.reading import ImportedDeployment, Reading
from windtunnel.scenarios.deployments.words import Word
from windtunnel.scenarios.deployments.yaml_tree import Tree

KIND = "helm"
FLAGS_OF_KEYS = {
    "maxModelLen": "--max-model-len",
    "dtype": "--dtype",
    "tensorParallelSize": "--tensor-parallel-size",
    "maxNumSeqs": "--max-num-seqs",
    "gpuMemoryUtilization": "--gpu-memory-utilization",
    "maxLoras": "--max-loras",
}
"""Keys of ``vllmConfig`` that become a flag with a value, in the chart's order."""
_PLAYS_NO_PART = {"v0", "v1", "prometheusMultiprocDir"}
_OF_RAY = {"pipelineParallelSize": "--pipeline-parallel-size"}


def is_helm(tree: Tree) -> bool:
    """Whether a document is values of this chart."""
    return isinstance(tree.get("servingEngineSpec").value, dict)


def read_helm(tree: Tree, base_dir: Path) -> list[ImportedDeployment]:
    """One deployment for each entry of modelSpec."""
    return [_model(spec, base_dir) for spec in tree.get("servingEngineSpec", "modelSpec").entries()]


def _model(spec: Tree, base_dir: Path) -> ImportedDeployment:
    reading = Reading(spec.source)
    repository, tag = spec.text("repository"), spec.text("tag")
    if repository or tag:
        reading.image(f"{repository}:{tag}", spec.get("tag").source)
    _surroundings(spec, reading)
    words = [*_front(spec, reading), *_config(spec, reading)]
    read_arguments(words, reading, SERVE, base_dir)
    return reading.finish(spec.text("name"), KIND)


def _surroundings(spec: Tree, reading: Reading) -> None:
    replicas, gpus = spec.get("replicaCount"), spec.get("requestGPU")
    is_ray = bool(spec.get("raySpec", "enabled").value)
    if str(replicas.value).isdigit():
        reading.num_replicas = 1 if is_ray else int(replicas.value)
    if str(gpus.value).isdigit() and int(gpus.value) > 0:
        nodes = 1
        if is_ray:
            nodes = int(replicas.value or 0) if str(replicas.value).isdigit() else 1
            head = spec.get("raySpec", "headNode", "requestGPU").value
            reading.devices(int(gpus.value) * nodes + int(head or 0), gpus.source)
        else:
            reading.devices(int(gpus.value), gpus.source)
    kind = spec.text("requestGPUType")
    if "mig-" in kind:
        reading.note(f"{spec.get('requestGPUType').source}: {kind} is a slice of a GPU, with a share of its memory")
    reading.gpu = gpu_of_terms(spec.get("nodeSelectorTerms"))
    environment = {item.text("name"): item.text("value") for item in spec.get("env").entries()}
    reading.environment(environment, spec.get("env").source)


def _front(spec: Tree, reading: Reading) -> Iterator[Word]:
    model = spec.get("modelURL")
    if model.value is not None:
        yield Word(str(model.value), model.source)
    else:
        reading.note(f"{spec.source}: no modelURL: give one")
    if spec.get("enableLoRA").value:
        yield Word("--enable-lora", spec.get("enableLoRA").source)


def _config(spec: Tree, reading: Reading) -> Iterator[Word]:
    """The flags that the chart makes of ``vllmConfig``; an empty one makes none."""
    config = spec.get("vllmConfig")
    if not config.value:
        return
    chunked, caching = config.get("enableChunkedPrefill"), config.get("enablePrefixCaching")
    if chunked.value is not None:
        yield Word("--enable-chunked-prefill" if chunked.value else "--no-enable-chunked-prefill", chunked.source)
    yield _prefix_caching(config, caching, reading)
    is_ray = bool(spec.get("raySpec", "enabled").value)
    for key, flag in {**FLAGS_OF_KEYS, **(_OF_RAY if is_ray else {})}.items():
        item = config.get(key)
        if item.value is not None:
            yield Word(flag, item.source)
            yield Word(str(item.value), item.source)
    if config.text("v0") == "1":
        reading.environment({"VLLM_USE_V1": "0"}, config.get("v0").source)
    _note_unknown(config, reading, is_ray)
    yield from item_words(config.get("extraArgs"), lambda text: (text, ()))


def _prefix_caching(config: Tree, caching: Tree, reading: Reading) -> Word:
    if caching.value:
        return Word("--enable-prefix-caching", caching.source)
    if caching.value is None:
        reading.note(
            f"{config.source}: without enablePrefixCaching the chart passes --no-enable-prefix-caching, "
            "where vLLM's own default is on: set it to true to keep prefix caching"
        )
    return Word("--no-enable-prefix-caching", caching.source)


def _note_unknown(config: Tree, reading: Reading, is_ray: bool) -> None:
    known = {*FLAGS_OF_KEYS, *_PLAYS_NO_PART, *(_OF_RAY if is_ray else {})}
    known |= {"enableChunkedPrefill", "enablePrefixCaching", "extraArgs"}
    for key, item in config.items():
        if key not in known:
            reading.note(f"{item.source}: the chart knows no vllmConfig.{key} and leaves it out: use extraArgs")
