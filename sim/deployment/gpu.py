"""What the common GPUs can hold and how fast they are, from their datasheets."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cache

GIB = 2**30


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One card, as the driver and the datasheet describe it.  Rates are peaks; FLOP/s are dense (no sparsity)."""

    name: str
    memory_bytes: int
    """Total device memory as the driver reports it (``torch.cuda.mem_get_info``), which is what
    gpu_memory_utilization multiplies.  It is less than the marketing figure, which counts in units of 10^9 or 2^30
    and includes what ECC and the driver keep; drivers differ by up to 0.3 %."""
    hbm_bandwidth_bytes_per_s: float
    bf16_flops_per_s: float
    """Tensor cores, bf16 or fp16 inputs, fp32 accumulation."""
    fp8_flops_per_s: float | None
    """None where the card has no fp8 units."""
    int8_flops_per_s: float | None
    link: str
    """How cards of one host talk to each other."""
    link_bytes_per_s: float
    """Of that link, in each direction."""
    link_latency_s: float
    """Of one small all-reduce over that link: an engineering estimate by kind of link.  vLLM's all-reduce of up to
    8 KiB in a CUDA graph takes 4 to 8 us on A100, H100 and B300 and 5 to 27 us on L40S (aiconfigurator-core 0.12)."""
    memory_source: str
    """Where ``memory_bytes`` was seen."""
    source: str
    """The datasheet of the other figures."""
    aliases: tuple[str, ...] = ()
    compute_capability: tuple[int, int] | None = None
    """Of a card of NVIDIA's, as its table of CUDA GPUs has it; None for others, and where it is not known."""

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "hbm_bandwidth_bytes_per_s", "bf16_flops_per_s", "link_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{self.name}: {name} must be positive, got {getattr(self, name)!r}")
        for name in ("fp8_flops_per_s", "int8_flops_per_s"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"{self.name}: {name} must be positive or None, got {getattr(self, name)!r}")
        if not self.link_latency_s >= 0:
            raise ValueError(f"{self.name}: link_latency_s must not be negative, got {self.link_latency_s!r}")

    @property
    def memory_gib(self) -> float:
        """``memory_bytes`` in GiB."""
        return self.memory_bytes / GIB

    def flops_per_s(self, gemm_dtype: str) -> float:
        """Dense peak for matrix products in "bf16" (fp16 is the same), "fp8" or "int8".

        A format the card has no units for runs at the bf16 rate, as the weight-only kernels that vLLM then falls back
        to do.  Raises ValueError for any other dtype.
        """
        if gemm_dtype == "bf16":
            return self.bf16_flops_per_s
        if gemm_dtype == "fp8":
            return self.fp8_flops_per_s or self.bf16_flops_per_s
        if gemm_dtype == "int8":
            return self.int8_flops_per_s or self.bf16_flops_per_s
        raise ValueError(f"gemm_dtype must be bf16, fp8 or int8, got {gemm_dtype!r}")


def load_gpu(name: str) -> GpuSpec:
    """The card of that name or alias ("h100", "H100-80GB", "a100-80g", "NVIDIA A100-SXM4-40GB", "Tesla T4").

    Case and punctuation do not matter, nor makers' names, a kind of memory, or the number behind SXM.  Raises
    ValueError, naming the nearest cards, for an unknown name.
    """
    known = _by_alias()
    wanted = _squeeze(name)
    if wanted in known:
        return known[wanted]
    near = difflib.get_close_matches(wanted, known, n=6, cutoff=0.4)
    names = list(dict.fromkeys(known[match].name for match in near))[:3]
    hint = f"nearest: {', '.join(names)}" if names else f"known: {', '.join(bundled_gpus())}"
    raise ValueError(f"unknown GPU {name!r}; {hint} (windtunnel gpus lists all)")


def bundled_gpus() -> list[str]:
    """Names of the cards in the table."""
    return [gpu.name for gpu in _GPUS]


def siblings(name: str) -> list[str]:
    """Names of the other cards that a name as short as ``a100`` could mean as well; none for one that says more."""
    if any(_MEMORY_KIND.fullmatch(word) for word in name.casefold().split()):
        return []  # the driver's full name
    chosen, start = load_gpu(name), _words(name)
    others = (gpu for gpu in _GPUS if gpu is not chosen)
    return [
        gpu.name for gpu in others if any(_words(alias)[: len(start)] == start for alias in (gpu.name, *gpu.aliases))
    ]


@cache
def _by_alias() -> dict[str, GpuSpec]:
    return {_squeeze(alias): gpu for gpu in _GPUS for alias in (gpu.name, *gpu.aliases)}


_MAKERS = ("nvidia", "amd", "geforce", "instinct", "tesla", "quadro", "hgx", "oam")
_MEMORY_SIZE = re.compile(r"(?<![a-z0-9])(\d+)\s*gi?b?(?![a-z0-9])")
_MEMORY_KIND = re.compile(r"hbm3e?|gddr\dx?")
"""HBM2e stays: of the H100 it tells the PCIe card."""


def _squeeze(name: str) -> str:
    return "".join(_words(name))


def _words(name: str) -> list[str]:
    """What of a name tells the card."""
    sized = _MEMORY_SIZE.sub(r"\1gb", name.casefold())
    words = (re.sub(r"^sxm\d$", "sxm", word) for word in re.split(r"[^a-z0-9]+", sized))
    return [word for word in words if word and word not in _MAKERS and not _MEMORY_KIND.fullmatch(word)]


def _gib(gib: float) -> int:
    return round(gib * GIB)


_LOG = "total in vLLM start-up logs"
_OOM = "total capacity in PyTorch's out-of-memory messages"

_NVLINK_LATENCY_S = 6e-6
_PCIE_LATENCY_S = 15e-6

_GPUS = (
    GpuSpec(
        name="A100-40GB-SXM",
        memory_bytes=_gib(39.49),
        hbm_bandwidth_bytes_per_s=1.555e12,
        bf16_flops_per_s=312e12,
        fp8_flops_per_s=None,
        int8_flops_per_s=624e12,
        link="NVLink 3",
        link_bytes_per_s=300e9,
        link_latency_s=_NVLINK_LATENCY_S,
        memory_source=_LOG,
        source="NVIDIA A100 Tensor Core GPU datasheet (40GB)",
        aliases=("a100-40", "a100-40gb", "a100-sxm4-40gb", "a100-40-sxm"),
        compute_capability=(8, 0),
    ),
    GpuSpec(
        name="A100-80GB-SXM",
        memory_bytes=_gib(79.25),
        hbm_bandwidth_bytes_per_s=2.039e12,
        bf16_flops_per_s=312e12,
        fp8_flops_per_s=None,
        int8_flops_per_s=624e12,
        link="NVLink 3",
        link_bytes_per_s=300e9,
        link_latency_s=_NVLINK_LATENCY_S,
        memory_source=_OOM,
        source="NVIDIA A100 80GB Tensor Core GPU datasheet",
        aliases=("a100", "a100-80", "a100-80gb", "a100-sxm4-80gb", "a100-sxm", "a100-80-sxm"),
        compute_capability=(8, 0),
    ),
    GpuSpec(
        name="A100-40GB-PCIe",
        memory_bytes=_gib(39.49),
        hbm_bandwidth_bytes_per_s=1.555e12,
        bf16_flops_per_s=312e12,
        fp8_flops_per_s=None,
        int8_flops_per_s=624e12,
        link="PCIe 4.0 x16",
        link_bytes_per_s=32e9,
        link_latency_s=_PCIE_LATENCY_S,
        memory_source="as the SXM card",
        source="NVIDIA A100 Tensor Core GPU datasheet (40GB)",
        aliases=("a100-pcie-40gb", "a100-40-pcie"),
        compute_capability=(8, 0),
    ),
    GpuSpec(
        name="A100-80GB-PCIe",
        memory_bytes=_gib(79.25),
        hbm_bandwidth_bytes_per_s=1.935e12,
        bf16_flops_per_s=312e12,
        fp8_flops_per_s=None,
        int8_flops_per_s=624e12,
        link="PCIe 4.0 x16",
        link_bytes_per_s=32e9,
        link_latency_s=_PCIE_LATENCY_S,
        memory_source="as the SXM card",
        source="NVIDIA A100 80GB Tensor Core GPU datasheet",
        aliases=("a100-80gb-pcie", "a100-80-pcie", "a100-pcie", "a100 80gb pcie", "a100-pcie-80gb"),
        compute_capability=(8, 0),
    ),
    GpuSpec(
        name="H100-SXM",
        memory_bytes=_gib(79.19),
        hbm_bandwidth_bytes_per_s=3.35e12,
        bf16_flops_per_s=989.4e12,
        fp8_flops_per_s=1978.9e12,
        int8_flops_per_s=1978.9e12,
        link="NVLink 4",
        link_bytes_per_s=450e9,
        link_latency_s=_NVLINK_LATENCY_S,
        memory_source=_LOG,
        source="NVIDIA H100 Tensor Core GPU datasheet (SXM); dense is half of the figures with sparsity",
        aliases=("h100", "h100-80", "h100-80gb", "h100-sxm-80gb", "h100-80gb-sxm", "h100-mega-80gb"),
        compute_capability=(9, 0),
    ),
    GpuSpec(
        name="H100-PCIe",
        memory_bytes=_gib(79.19),
        hbm_bandwidth_bytes_per_s=2.0e12,
        bf16_flops_per_s=756.5e12,
        fp8_flops_per_s=1513e12,
        int8_flops_per_s=1513e12,
        link="PCIe 5.0 x16",
        link_bytes_per_s=64e9,
        link_latency_s=_PCIE_LATENCY_S,
        memory_source="as the SXM card",
        source="NVIDIA H100 Tensor Core GPU datasheet (PCIe); dense is half of the figures with sparsity",
        aliases=("h100-pcie-80gb", "h100-80gb-pcie", "h100-80gb-hbm2e"),
        compute_capability=(9, 0),
    ),
    GpuSpec(
        name="H100-NVL",
        memory_bytes=_gib(93.10),
        hbm_bandwidth_bytes_per_s=3.9e12,
        bf16_flops_per_s=835.5e12,
        fp8_flops_per_s=1670.5e12,
        int8_flops_per_s=1670.5e12,
        link="NVLink bridge",
        link_bytes_per_s=300e9,
        link_latency_s=_NVLINK_LATENCY_S,
        memory_source=_OOM,
        source="NVIDIA H100 Tensor Core GPU datasheet (NVL, one card); dense is half of the figures with sparsity",
        aliases=("h100-94gb", "h100-nvl-94gb"),
        compute_capability=(9, 0),
    ),
    GpuSpec(
        name="H200",
        memory_bytes=_gib(139.80),
        hbm_bandwidth_bytes_per_s=4.8e12,
        bf16_flops_per_s=989.4e12,
        fp8_flops_per_s=1978.9e12,
        int8_flops_per_s=1978.9e12,
        link="NVLink 4",
        link_bytes_per_s=450e9,
        link_latency_s=_NVLINK_LATENCY_S,
        memory_source=_OOM,
        source="NVIDIA H200 Tensor Core GPU datasheet (SXM); dense is half of the figures with sparsity",
        aliases=("h200-sxm", "h200-141gb", "h200-141", "h200-sxm-141gb"),
        compute_capability=(9, 0),
    ),
    GpuSpec(
        name="B200",
        memory_bytes=_gib(178.35),
        hbm_bandwidth_bytes_per_s=7.7e12,
        bf16_flops_per_s=2.25e15,
        fp8_flops_per_s=4.5e15,
        int8_flops_per_s=4.5e15,
        link="NVLink 5",
        link_bytes_per_s=900e9,
        link_latency_s=_NVLINK_LATENCY_S,
        memory_source=_OOM,
        source="NVIDIA Blackwell datasheet (HGX B200, one eighth); dense is half of the figures with sparsity",
        aliases=("b200-sxm", "b200-180gb", "b200-192gb"),
        compute_capability=(10, 0),
    ),
    GpuSpec(
        name="B300",
        memory_bytes=_gib(267.69),
        hbm_bandwidth_bytes_per_s=7.75e12,
        bf16_flops_per_s=2.25e15,
        fp8_flops_per_s=4.5e15,
        int8_flops_per_s=153.5e12,
        link="NVLink 5",
        link_bytes_per_s=900e9,
        link_latency_s=_NVLINK_LATENCY_S,
        memory_source=_OOM,
        source="NVIDIA Blackwell Ultra datasheet (HGX B300, one eighth); dense is half of the figures with sparsity",
        aliases=("b300-sxm", "b300-sxm6-ac", "b300-288gb"),
        compute_capability=(10, 3),
    ),
    GpuSpec(
        name="L40S",
        memory_bytes=_gib(44.39),
        hbm_bandwidth_bytes_per_s=864e9,
        bf16_flops_per_s=362.05e12,
        fp8_flops_per_s=733e12,
        int8_flops_per_s=733e12,
        link="PCIe 4.0 x16",
        link_bytes_per_s=32e9,
        link_latency_s=_PCIE_LATENCY_S,
        memory_source=_LOG,
        source="NVIDIA L40S GPU datasheet",
        aliases=("l40s-48gb", "l40s-pcie-48gb"),
        compute_capability=(8, 9),
    ),
    GpuSpec(
        name="L4",
        memory_bytes=_gib(22.03),
        hbm_bandwidth_bytes_per_s=300e9,
        bf16_flops_per_s=121e12,
        fp8_flops_per_s=242.5e12,
        int8_flops_per_s=242.5e12,
        link="PCIe 4.0 x16",
        link_bytes_per_s=32e9,
        link_latency_s=_PCIE_LATENCY_S,
        memory_source=_OOM,
        source="NVIDIA L4 Tensor Core GPU datasheet; dense is half of the figures with sparsity",
        aliases=("l4-24gb",),
        compute_capability=(8, 9),
    ),
    GpuSpec(
        name="A10G",
        memory_bytes=_gib(22.06),
        hbm_bandwidth_bytes_per_s=600e9,
        bf16_flops_per_s=70e12,
        fp8_flops_per_s=None,
        int8_flops_per_s=140e12,
        link="PCIe 4.0 x16",
        link_bytes_per_s=32e9,
        link_latency_s=_PCIE_LATENCY_S,
        memory_source=_LOG,
        source="NVIDIA A10G GPU datasheet (AWS)",
        aliases=("a10g-24gb",),
        compute_capability=(8, 6),
    ),
    GpuSpec(
        name="RTX-3090",
        memory_bytes=_gib(23.58),
        hbm_bandwidth_bytes_per_s=936e9,
        bf16_flops_per_s=71e12,
        fp8_flops_per_s=None,
        int8_flops_per_s=284e12,
        link="PCIe 4.0 x16",
        link_bytes_per_s=32e9,
        link_latency_s=_PCIE_LATENCY_S,
        memory_source=_LOG,
        source="NVIDIA Ampere GA102 architecture whitepaper (GeForce RTX 3090)",
        aliases=("3090", "rtx3090", "rtx-3090-24gb", "3090-24gb"),
        compute_capability=(8, 6),
    ),
    GpuSpec(
        name="RTX-4090",
        memory_bytes=_gib(23.516),
        hbm_bandwidth_bytes_per_s=1.008e12,
        bf16_flops_per_s=165.2e12,
        fp8_flops_per_s=330.3e12,
        int8_flops_per_s=660.6e12,
        link="PCIe 4.0 x16",
        link_bytes_per_s=32e9,
        link_latency_s=_PCIE_LATENCY_S,
        memory_source=_LOG,
        source="NVIDIA Ada GPU architecture whitepaper (GeForce RTX 4090)",
        aliases=("4090", "rtx4090", "rtx-4090-24gb", "4090-24gb"),
        compute_capability=(8, 9),
    ),
    GpuSpec(
        name="RTX-5090",
        memory_bytes=_gib(31.37),
        hbm_bandwidth_bytes_per_s=1.792e12,
        bf16_flops_per_s=209.5e12,
        fp8_flops_per_s=419e12,
        int8_flops_per_s=838e12,
        link="PCIe 5.0 x16",
        link_bytes_per_s=64e9,
        link_latency_s=_PCIE_LATENCY_S,
        memory_source=_LOG,
        source="NVIDIA RTX Blackwell GPU architecture whitepaper (GeForce RTX 5090)",
        aliases=("5090", "rtx5090", "rtx-5090-32gb", "5090-32gb"),
        compute_capability=(12, 0),
    ),
    GpuSpec(
        name="MI300X",
        memory_bytes=_gib(191.69),
        hbm_bandwidth_bytes_per_s=5.3e12,
        bf16_flops_per_s=1307.4e12,
        fp8_flops_per_s=2614.9e12,
        int8_flops_per_s=2614.9e12,
        link="Infinity Fabric",
        link_bytes_per_s=448e9,
        link_latency_s=_NVLINK_LATENCY_S,
        memory_source=_LOG,
        source="AMD Instinct MI300X accelerator datasheet (seven links of 64 GB/s in each direction)",
        aliases=("mi300x-192gb", "mi300"),
    ),
    GpuSpec(
        name="T4",
        memory_bytes=_gib(14.56),
        hbm_bandwidth_bytes_per_s=320e9,
        bf16_flops_per_s=65e12,
        fp8_flops_per_s=None,
        int8_flops_per_s=130e12,
        link="PCIe 3.0 x16",
        link_bytes_per_s=16e9,
        link_latency_s=_PCIE_LATENCY_S,
        memory_source=_LOG,
        source="NVIDIA T4 Tensor Core GPU datasheet and product brief (memory); its units take fp16, not bf16",
        aliases=("t4-16gb",),
        compute_capability=(7, 5),
    ),
    GpuSpec(
        name="V100-32GB-SXM",
        memory_bytes=_gib(31.74),
        hbm_bandwidth_bytes_per_s=900e9,
        bf16_flops_per_s=125e12,
        fp8_flops_per_s=None,
        int8_flops_per_s=None,
        link="NVLink 2",
        link_bytes_per_s=150e9,
        link_latency_s=_NVLINK_LATENCY_S,
        memory_source=_LOG,
        source="NVIDIA V100 Tensor Core GPU datasheet (SXM2); its units take fp16, not bf16",
        aliases=("v100", "v100-32gb", "v100-32", "v100-sxm2-32gb", "v100-sxm"),
        compute_capability=(7, 0),
    ),
    GpuSpec(
        name="V100-16GB-SXM",
        memory_bytes=_gib(15.77),
        hbm_bandwidth_bytes_per_s=900e9,
        bf16_flops_per_s=125e12,
        fp8_flops_per_s=None,
        int8_flops_per_s=None,
        link="NVLink 2",
        link_bytes_per_s=150e9,
        link_latency_s=_NVLINK_LATENCY_S,
        memory_source=_OOM,
        source="NVIDIA V100 Tensor Core GPU datasheet (SXM2); its units take fp16, not bf16",
        aliases=("v100-16gb", "v100-16", "v100-sxm2-16gb"),
        compute_capability=(7, 0),
    ),
    GpuSpec(
        name="A10",
        memory_bytes=_gib(22.18),
        hbm_bandwidth_bytes_per_s=600e9,
        bf16_flops_per_s=125e12,
        fp8_flops_per_s=None,
        int8_flops_per_s=250e12,
        link="PCIe 4.0 x16",
        link_bytes_per_s=32e9,
        link_latency_s=_PCIE_LATENCY_S,
        memory_source=_OOM,
        source="NVIDIA A10 Tensor Core GPU datasheet",
        aliases=("a10-24gb", "a10-pcie-24gb"),
        compute_capability=(8, 6),
    ),
    GpuSpec(
        name="A40",
        memory_bytes=_gib(44.39),
        hbm_bandwidth_bytes_per_s=696e9,
        bf16_flops_per_s=149.7e12,
        fp8_flops_per_s=None,
        int8_flops_per_s=299.3e12,
        link="PCIe 4.0 x16",
        link_bytes_per_s=32e9,
        link_latency_s=_PCIE_LATENCY_S,
        memory_source="as the L40S, which has the same memory with the same ECC",
        source="NVIDIA A40 datasheet; dense is half of the figures with sparsity",
        aliases=("a40-48gb",),
        compute_capability=(8, 6),
    ),
    GpuSpec(
        name="L40",
        memory_bytes=_gib(44.39),
        hbm_bandwidth_bytes_per_s=864e9,
        bf16_flops_per_s=181.05e12,
        fp8_flops_per_s=362e12,
        int8_flops_per_s=362e12,
        link="PCIe 4.0 x16",
        link_bytes_per_s=32e9,
        link_latency_s=_PCIE_LATENCY_S,
        memory_source="as the L40S, which has the same memory with the same ECC",
        source="NVIDIA L40 GPU datasheet",
        aliases=("l40-48gb",),
        compute_capability=(8, 9),
    ),
    GpuSpec(
        name="RTX-A6000",
        memory_bytes=_gib(47.53),
        hbm_bandwidth_bytes_per_s=768e9,
        bf16_flops_per_s=154.8e12,
        fp8_flops_per_s=None,
        int8_flops_per_s=309.7e12,
        link="PCIe 4.0 x16",
        link_bytes_per_s=32e9,
        link_latency_s=_PCIE_LATENCY_S,
        memory_source=_OOM,
        source="NVIDIA Ampere GA102 architecture whitepaper (RTX A6000)",
        aliases=("a6000", "a6000-48gb", "rtx-a6000-48gb"),
        compute_capability=(8, 6),
    ),
    GpuSpec(
        name="RTX-6000-Ada",
        memory_bytes=_gib(47.50),
        hbm_bandwidth_bytes_per_s=960e9,
        bf16_flops_per_s=364.2e12,
        fp8_flops_per_s=728.5e12,
        int8_flops_per_s=728.5e12,
        link="PCIe 4.0 x16",
        link_bytes_per_s=32e9,
        link_latency_s=_PCIE_LATENCY_S,
        memory_source=_OOM,
        source="NVIDIA RTX 6000 Ada Generation datasheet; dense is half of the figures with sparsity",
        aliases=("rtx-6000-ada-generation", "6000-ada", "rtx-6000-ada-48gb"),
        compute_capability=(8, 9),
    ),
    GpuSpec(
        name="RTX-PRO-6000",
        memory_bytes=_gib(94.97),
        hbm_bandwidth_bytes_per_s=1.792e12,
        bf16_flops_per_s=503.8e12,
        fp8_flops_per_s=1007.6e12,
        int8_flops_per_s=1007.6e12,
        link="PCIe 5.0 x16",
        link_bytes_per_s=64e9,
        link_latency_s=_PCIE_LATENCY_S,
        memory_source=_LOG,
        source="NVIDIA RTX Blackwell PRO GPU architecture whitepaper (RTX PRO 6000 Workstation Edition)",
        aliases=(
            "pro-6000",
            "rtx-pro-6000-96gb",
            "rtx-pro-6000-blackwell",
            "rtx-pro-6000-blackwell-workstation-edition",
            "rtx-pro-6000-blackwell-server-edition",
        ),
        compute_capability=(12, 0),
    ),
    GpuSpec(
        name="H20",
        memory_bytes=_gib(95.03),
        hbm_bandwidth_bytes_per_s=4.0e12,
        bf16_flops_per_s=148e12,
        fp8_flops_per_s=296e12,
        int8_flops_per_s=296e12,
        link="NVLink 4",
        link_bytes_per_s=450e9,
        link_latency_s=_NVLINK_LATENCY_S,
        memory_source="nvidia-smi's 97,871 MiB less the 0.57 % that drivers keep of the H100",
        source="NVIDIA HGX H20 specification",
        aliases=("h20-96gb", "h20-sxm"),
        compute_capability=(9, 0),
    ),
    GpuSpec(
        name="GH200-96GB",
        memory_bytes=_gib(94.50),
        hbm_bandwidth_bytes_per_s=4.0e12,
        bf16_flops_per_s=989.4e12,
        fp8_flops_per_s=1978.9e12,
        int8_flops_per_s=1978.9e12,
        link="NVLink 4",
        link_bytes_per_s=450e9,
        link_latency_s=_NVLINK_LATENCY_S,
        memory_source=_OOM,
        source="NVIDIA GH200 Grace Hopper Superchip datasheet (96 GB); dense is half of the figures with sparsity",
        aliases=("gh200", "gh200-480gb"),
        compute_capability=(9, 0),
    ),
    GpuSpec(
        name="MI210",
        memory_bytes=_gib(63.98),
        hbm_bandwidth_bytes_per_s=1.6384e12,
        bf16_flops_per_s=181e12,
        fp8_flops_per_s=None,
        int8_flops_per_s=181e12,
        link="PCIe 4.0 x16",
        link_bytes_per_s=32e9,
        link_latency_s=_PCIE_LATENCY_S,
        memory_source=_OOM,
        source="AMD Instinct MI210 accelerator datasheet",
        aliases=("mi210-64gb",),
    ),
    GpuSpec(
        name="MI250X",
        memory_bytes=_gib(63.98),
        hbm_bandwidth_bytes_per_s=1.6384e12,
        bf16_flops_per_s=191.5e12,
        fp8_flops_per_s=None,
        int8_flops_per_s=191.5e12,
        link="Infinity Fabric",
        link_bytes_per_s=200e9,
        link_latency_s=_NVLINK_LATENCY_S,
        memory_source=_OOM,
        source="AMD Instinct MI250X accelerator datasheet: one of its two dies, each a device with four links",
        aliases=("mi250", "mi250x-128gb", "mi250x-mi250"),
    ),
    GpuSpec(
        name="MI325X",
        memory_bytes=_gib(255.98),
        hbm_bandwidth_bytes_per_s=6.0e12,
        bf16_flops_per_s=1307.4e12,
        fp8_flops_per_s=2614.9e12,
        int8_flops_per_s=2614.9e12,
        link="Infinity Fabric",
        link_bytes_per_s=448e9,
        link_latency_s=_NVLINK_LATENCY_S,
        memory_source=_OOM,
        source="AMD Instinct MI325X accelerator datasheet (seven links of 64 GB/s in each direction)",
        aliases=("mi325", "mi325x-256gb"),
    ),
    GpuSpec(
        name="MI355X",
        memory_bytes=_gib(287.98),
        hbm_bandwidth_bytes_per_s=8.0e12,
        bf16_flops_per_s=2516.6e12,
        fp8_flops_per_s=5033.2e12,
        int8_flops_per_s=5033.2e12,
        link="Infinity Fabric",
        link_bytes_per_s=537.6e9,
        link_latency_s=_NVLINK_LATENCY_S,
        memory_source="its 288 GiB less the 16 MiB that drivers keep of the MI325X",
        source="AMD Instinct MI355X accelerator datasheet (seven links of 76.8 GB/s in each direction)",
        aliases=("mi355", "mi355x-288gb"),
    ),
)
