"""Deployments of vLLM as people hold them: read command lines, config files, compose files, charts, manifests, logs and
Python calls; write the recommended ``vllm serve`` line.

>>> from windtunnel.scenarios.deployments import read_deployment, serve_command
>>> read_deployment("vllm serve Qwen/Qwen3-8B -tp 2 --max-model-len 16k").settings
{'model': 'Qwen/Qwen3-8B', 'tensor_parallel_size': 2, 'max_model_len': 16000}
>>> serve_command({"model": "Qwen/Qwen3-8B", "enable_prefix_caching": False})
'vllm serve Qwen/Qwen3-8B --no-enable-prefix-caching'
"""

from __future__ import annotations

from windtunnel.scenarios.deployments.errors import DeploymentError, DeploymentUnreadable
from windtunnel.scenarios.deployments.read import KINDS, read_deployment, read_deployments
from windtunnel.scenarios.deployments.reading import ImportedDeployment
from windtunnel.scenarios.deployments.settings import SETTINGS
from windtunnel.scenarios.deployments.write import compose_service, helm_values, serve_command, without_defaults

__all__ = [
    "KINDS",
    "SETTINGS",
    "DeploymentError",
    "DeploymentUnreadable",
    "ImportedDeployment",
    "compose_service",
    "helm_values",
    "read_deployment",
    "read_deployments",
    "serve_command",
    "without_defaults",
]
