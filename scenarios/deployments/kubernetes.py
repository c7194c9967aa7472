"""Kubernetes manifests: pods of any kind, KServe's services, and the values of the llm-d-modelservice chart.

Sources: ``charts/llm-d-modelservice/templates/_helpers.tpl`` (which flags ``vllmServe`` and ``imageDefault`` put in
front, and how the kinds of parallelism follow from each other) and ``config/llmisvcconfig`` of KServe.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from windtunnel.scenarios.deployments.containers import Container, expand_references, item_words
from windtunnel.scenarios.deployments.reading import ImportedDeployment, Reading
from windtunnel.scenarios.deployments.shell import split_words
from windtunnel.scenarios.deployments.words import Word
from windtunnel.scenarios.deployments.yaml_tree import Tree

MANIFEST, KSERVE, LLM_D = "kubernetes", "kserve", "llm-d"
_GPU_RESOURCE = re.compile(r"(nvidia|amd)\.com/(gpu|mig-.*)$|gpu\.intel\.com/.*")
_GPU_LABEL = re.compile(r"(^|[./-])gpu([./-]|$)|accelerator", re.IGNORECASE)
_KSERVE_FLAGS = {"--model_name", "--model_dir", "--model_id", "--model_revision", "--backend", "--task", "--http_port"}
"""Options of KServe's Hugging Face server that are not vLLM's."""


class _Workload(NamedTuple):
    """A pod template with what stands around it."""

    name: str
    pod: Tree
    replicas: int
    nodes: int
    """Pods that make up one replica (LeaderWorkerSet)."""


def is_manifest(tree: Tree) -> bool:
    """Whether a document is a Kubernetes object."""
    return isinstance(tree.get("apiVersion").value, str) and isinstance(tree.get("kind").value, str)


def is_llm_d(tree: Tree) -> bool:
    """Whether a document is the values of the llm-d-modelservice chart."""
    return isinstance(tree.get("modelArtifacts").value, dict) and (
        tree.get("decode").value is not None or tree.get("prefill").value is not None
    )


def read_manifests(trees: list[Tree], base_dir: Path) -> list[ImportedDeployment]:
    """One deployment for each container that runs vLLM."""
    trees = [tree for document in trees for tree in _listed(document)]
    runtimes = {tree.text("metadata", "name"): tree for tree in trees if "ServingRuntime" in tree.text("kind")}
    services = [tree for tree in trees if tree.text("kind") == "InferenceService"]
    used = {tree.text("spec", "predictor", "model", "runtime") for tree in services}
    used |= {tree.text("metadata", "name") for tree in services}
    found: list[ImportedDeployment | None] = []
    for tree in trees:
        kind, name = tree.text("kind"), tree.text("metadata", "name")
        if kind == "InferenceService":
            found.append(_inference_service(tree, runtimes, base_dir))
        elif kind == "LLMInferenceService":
            found += _llm_inference_service(tree, base_dir)
        elif "ServingRuntime" not in kind or name not in used:
            found += [_pod(workload, base_dir) for workload in _workloads(tree)]
    return [deployment for deployment in found if deployment is not None]


def read_llm_d(tree: Tree, base_dir: Path) -> list[ImportedDeployment]:
    """The decode and the prefill engines of a values file of llm-d-modelservice."""
    found = [_llm_d_role(tree, role, base_dir) for role in ("decode", "prefill")]
    return [deployment for deployment in found if deployment is not None]


def _listed(tree: Tree) -> Iterator[Tree]:
    """The objects of a List, or the object itself."""
    if tree.text("kind") == "List":
        yield from tree.get("items").entries()
    else:
        yield tree


def _workloads(tree: Tree) -> Iterator[_Workload]:
    """All pod templates of an object, however deep."""
    name = tree.text("metadata", "name") or tree.text("kind")
    group = tree.get("spec", "leaderWorkerTemplate")
    if group.value is not None:
        pod = group.get("leaderTemplate", "spec")
        pod = pod if pod.value is not None else group.get("workerTemplate", "spec")
        yield _Workload(name, pod, _int(tree.get("spec", "replicas"), 1), _int(group.get("size"), 1))
        return
    yield from _pods_below(tree, name, 1)


def _pods_below(tree: Tree, name: str, replicas: int) -> Iterator[_Workload]:
    replicas = _int(tree.get("replicas"), replicas)
    if isinstance(tree.get("containers").value, list):
        yield _Workload(name, tree, replicas, 1)
        return
    for item in tree.children():
        yield from _pods_below(item, name, replicas)


def _pod(workload: _Workload, base_dir: Path, kind: str = MANIFEST) -> ImportedDeployment | None:
    for entry in workload.pod.get("containers").entries():
        reading = Reading(entry.source)
        _surroundings(workload, entry, reading)
        deployment = _container(entry, reading).read(reading, kind, base_dir, workload.name)
        if deployment is not None:
            return deployment
    return None


def _surroundings(workload: _Workload, container: Tree, reading: Reading) -> None:
    reading.num_replicas = workload.replicas
    _count_gpus(container.get("resources"), reading, workload.nodes)
    reading.gpu = _gpu_of(workload.pod)


def _container(tree: Tree, reading: Reading, front: tuple[Word, ...] = ()) -> Container:
    environment = _environment(tree.get("env"))
    image = tree.get("image")
    _check_strings(tree, reading)
    return Container(
        name=tree.text("name"),
        image=Word(tree.text("image"), image.source),
        command=_expanded(tree.get("command"), environment),
        arguments=[*front, *_expanded(tree.get("args"), environment)],
        environment=environment,
        source=tree.source,
        environment_source=tree.get("env").source,
    )


def _expanded(tree: Tree, environment: Mapping[str, str]) -> list[Word]:
    return item_words(tree, lambda text: expand_references(text, environment))


def _check_strings(tree: Tree, reading: Reading) -> None:
    for key in ("command", "args"):
        for item in tree.get(key).entries():
            if not isinstance(item.value, str):
                reading.refusal(
                    f"{item.source}: {item.value} in {key} is no text, which Kubernetes refuses: put it in quotes"
                )


def _environment(tree: Tree) -> dict[str, str]:
    pairs = [(item.text("name"), item.get("value").value) for item in tree.entries()]
    return {name: str(value) for name, value in pairs if name and value is not None}


def _count_gpus(resources: Tree, reading: Reading, nodes: int = 1) -> None:
    """GPUs of one replica; limits say it, requests where there are none."""
    for part in ("limits", "requests"):
        for name, item in resources.get(part).items():
            if not _GPU_RESOURCE.match(name) or not str(item.value).isdigit():
                continue
            reading.devices(int(item.value) * nodes, item.source)
            if "mig-" in name:
                reading.note(f"{item.source}: {name} is a slice of a GPU, with a share of its memory")
            return


def _gpu_of(pod: Tree) -> str | None:
    """What a node selector or a required affinity says about the GPU."""
    for name, item in pod.get("nodeSelector").items():
        if _GPU_LABEL.search(name) and _tells_a_product(item.value):
            return str(item.value)
    terms = pod.get("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms")
    return gpu_of_terms(terms)


def gpu_of_terms(terms: Tree) -> str | None:
    """The GPU that node selector terms ask for."""
    for term in terms.entries():
        for expression in term.get("matchExpressions").entries():
            values = expression.get("values").value
            if _GPU_LABEL.search(expression.text("key")) and isinstance(values, list) and len(values) == 1:
                return str(values[0]) if _tells_a_product(values[0]) else None
    return None


def _tells_a_product(value: object) -> bool:
    return str(value).lower() not in ("true", "false", "none", "present") and not str(value).isdigit()


def _int(tree: Tree, default: int) -> int:
    return int(str(tree.value)) if str(tree.value).isdigit() else default


# ------------------------------------------------------------------ KServe


def _inference_service(tree: Tree, runtimes: Mapping[str, Tree], base_dir: Path) -> ImportedDeployment | None:
    """KServe appends the service's arguments to those of its runtime's container."""
    name = tree.text("metadata", "name")
    predictor = tree.get("spec", "predictor")
    replicas = _int(predictor.get("minReplicas"), 1)
    model = predictor.get("model")
    if model.value is None:
        return _pod(_Workload(name, predictor, replicas, 1), base_dir, KSERVE)
    runtime = runtimes.get(model.text("runtime") or name)
    own = runtime.get("spec", "containers", 0) if runtime is not None else None
    reading = Reading(model.source)
    _surroundings(_Workload(name, predictor, replicas, 1), model, reading)
    if own is not None and reading.num_gpus is None:
        _count_gpus(own.get("resources"), reading)
    environment = {**(_environment(own.get("env")) if own is not None else {}), **_environment(model.get("env"))}
    arguments = [
        *(_expanded(own.get("args"), environment) if own is not None else []),
        *_expanded(model.get("args"), environment),
    ]
    container = Container(
        name=name,
        image=Word((own.text("image") if own is not None else "") or "vllm", model.source),
        command=_expanded(own.get("command"), environment) if own is not None else [],
        arguments=_of_vllm(arguments, reading),
        environment=environment,
        source=model.source,
    )
    if own is None:
        _only_a_vllm_runtime(model, reading)
    _model_of_uri(model.get("storageUri"), reading)
    return container.read(reading, KSERVE, base_dir, name)


def _only_a_vllm_runtime(model: Tree, reading: Reading) -> None:
    runtime = model.text("runtime") or model.text("modelFormat", "name")
    reading.note(
        f"{model.source}: the serving runtime {runtime!r} is not in this file; its own arguments are not known"
    )


def _of_vllm(words: list[Word], reading: Reading) -> list[Word]:
    """The arguments that KServe's own server passes on to vLLM, with the model it names."""
    found: list[Word] = []
    at = 0
    while at < len(words):
        flag, equals, value = words[at].text.partition("=")
        name = flag.replace("-", "_").replace("__", "--", 1)
        if name not in _KSERVE_FLAGS:
            found.append(words[at])
        else:
            text = value if equals else words[at + 1].text if at + 1 < len(words) else ""
            if name == "--model_id":
                reading.set("model", text, words[at].source, flag)
            at += not equals
        at += 1
    return found


def _model_of_uri(uri: Tree, reading: Reading) -> None:
    """The model that a storage URI names, where it is one of Hugging Face."""
    text = str(uri.value or "")
    if text.startswith("hf://"):
        reading.mounted = (text.removeprefix("hf://").partition(":")[0], uri.source)
    elif text:
        reading.note(f"{uri.source}: {text} does not tell which model it holds: give --model")


def _llm_inference_service(tree: Tree, base_dir: Path) -> list[ImportedDeployment | None]:
    name = tree.text("metadata", "name")
    spec = tree.get("spec")
    found = [_llm_workload(name, spec, spec, base_dir)]
    if spec.get("prefill").value is not None:
        found.append(_llm_workload(f"{name}-prefill", spec.get("prefill"), spec, base_dir))
    return found


def _llm_workload(name: str, workload: Tree, spec: Tree, base_dir: Path) -> ImportedDeployment | None:
    container = workload.get("template", "containers", 0)
    reading = Reading(container.source if container.value is not None else workload.source)
    reading.num_replicas = _int(workload.get("replicas"), 1)
    reading.gpu = _gpu_of(workload.get("template"))
    _count_gpus(container.get("resources"), reading)
    _parallelism(workload.get("parallelism"), reading)
    _model_of_uri(spec.get("model", "uri"), reading)
    environment = _environment(container.get("env"))
    additional = split_words(environment.get("VLLM_ADDITIONAL_ARGS", ""), container.get("env").source, environment)
    made = _container(container, reading)
    made = made._replace(
        image=made.image._replace(text=made.image.text or "vllm"), arguments=[*made.arguments, *additional]
    )
    return made.read(reading, KSERVE, base_dir, name)


def _parallelism(tree: Tree, reading: Reading) -> None:
    keys = {
        "tensor": "tensor_parallel_size",
        "pipeline": "pipeline_parallel_size",
        "data": "data_parallel_size",
        "dataLocal": "data_parallel_size_local",
    }
    for key, setting in keys.items():
        item = tree.get(key)
        if item.value is not None:
            reading.set(setting, _int(item, 1), item.source, f"parallelism.{key}")
    if tree.get("expert").value is True:
        reading.set("enable_expert_parallel", True, tree.get("expert").source, "parallelism.expert")


# ------------------------------------------------------------------ llm-d


def _llm_d_role(tree: Tree, role: str, base_dir: Path) -> ImportedDeployment | None:
    spec = tree.get(role)
    if spec.value is None or spec.get("create").value is False:
        return None
    container = spec.get("containers", 0)
    reading = Reading(container.source)
    reading.num_replicas = _int(spec.get("replicas"), 1)
    labels = spec.get("acceleratorTypes", "labelValues").value
    reading.gpu = str(labels[0]) if isinstance(labels, list) and len(labels) == 1 else None
    parallel = _llm_d_parallelism(spec.get("parallelism"))
    _count_gpus(container.get("resources"), reading)
    if reading.num_gpus is None:
        reading.num_gpus = parallel["TP_SIZE"] * parallel["DP_SIZE_LOCAL"]
    command = container.text("modelCommand")
    front = _llm_d_front(tree, spec, parallel) if command in ("vllmServe", "imageDefault") else ()
    made = _container(container, reading, front)
    variables = {**{name: str(value) for name, value in parallel.items()}, **made.environment}
    made = made._replace(
        command=[Word("vllm"), Word("serve")] if command == "vllmServe" else made.command,
        arguments=[_with_variables(word, variables) for word in made.arguments],
        environment=variables,
    )
    return made.read(reading, LLM_D, base_dir, role)


def _with_variables(word: Word, variables: Mapping[str, str]) -> Word:
    text, unresolved = expand_references(word.text, variables)
    return word._replace(text=text, unresolved=unresolved)


def _llm_d_front(tree: Tree, spec: Tree, parallel: Mapping[str, int]) -> tuple[Word, ...]:
    """What the chart puts in front of the container's own arguments."""
    uri = tree.get("modelArtifacts", "uri")
    words = [Word(_llm_d_model(tree), uri.source)]
    flags = {"TP_SIZE": "--tensor-parallel-size", "DP_SIZE": "--data-parallel-size"}
    flags["DP_SIZE_LOCAL"] = "--data-parallel-size-local"
    for name, flag in flags.items():
        if parallel[name] > 1:
            words += [Word(flag, spec.get("parallelism").source), Word(str(parallel[name]))]
    return tuple(words)


def _llm_d_model(tree: Tree) -> str:
    """The model by its artefact: hf:// names it, pvc:// is a path, pvc+hf:// ends in it."""
    artefacts = tree.get("modelArtifacts")
    protocol, _, rest = artefacts.text("uri").partition("://")
    rest = rest.strip('"')
    if "{{" in rest or not rest:
        return artefacts.text("name")
    if protocol == "pvc+hf":
        return "/".join(rest.split("/")[-2:])
    if protocol == "pvc":
        return f"{artefacts.text('mountPath') or '/model-cache'}/{rest.partition('/')[2]}"
    return rest


def _llm_d_parallelism(tree: Tree) -> dict[str, int]:
    """Sizes of tensor and data parallelism as the chart works them out."""
    tensor, data, local, workers = (_int(tree.get(key), 0) for key in ("tensor", "data", "dataLocal", "workers"))
    total = data or (local * workers if local and workers else local) or 1
    per_worker = local or (data // workers if data and workers else data) or 1
    return {"TP_SIZE": tensor or 1, "DP_SIZE": total, "DP_SIZE_LOCAL": per_worker}
