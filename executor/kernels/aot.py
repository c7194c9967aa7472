"""Compile kernels for GPUs that are not here, and read what the compiler says of them.

What a kernel module launches and what is compiled here is chosen by the same ``config`` function of that module, so
that what is proven is what runs.  Needs a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any, NamedTuple

SHARED_BYTES_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
"""Shared memory one thread block may have.  Sources: CUDA C++ Programming Guide, table of compute capabilities; AMD
CDNA 3 instruction set reference (local data share)."""

_DIVISIBLE_BY_16 = [["tt.divisibility", 16]]

_FEATURES = {
    "mma.sync": re.compile(r"\bmma\.sync"),
    "wgmma": re.compile(r"\bwgmma\.mma_async"),
    "tcgen05": re.compile(r"\btcgen05\.mma"),
    "128-bit loads": re.compile(
        r"\bld\.global\S*\.(?:v4\.[bfu]32|v2\.[bfu]64|b128)|\bcp\.async\.cg\.shared\.global\b.*\b0x10\b"
    ),
    "128-bit stores": re.compile(r"\bst\.global\S*\.(?:v4\.[bfu]32|v2\.[bfu]64|b128)"),
}


class AotCase(NamedTuple):
    """One kernel as it would be launched: types of its arguments, its constants, its number of warps."""

    name: str
    kernel: Any
    """What @triton.jit made."""
    signature: dict[str, str]
    """Argument -> type ("*bf16", "i32", "fp32", "constexpr" ...), in the order of the arguments."""
    constexprs: dict[str, Any]
    """Argument -> value, for every argument whose type is "constexpr"."""
    aligned: tuple[str, ...] = ()
    """Pointers and integers that are divisible by 16, as the launcher would find; without them nothing vectorises."""
    num_warps: int = 4
    num_stages: int = 3


class AotReport(NamedTuple):
    """What became of a case.  Counts are per thread, except the shared memory of a block."""

    name: str
    target: str
    """"sm_90", "gfx942" ..."""
    registers: int
    spill_bytes: int
    """Stored to and loaded from local memory because registers ran out."""
    stack_bytes: int
    shared_bytes: int
    binary_bytes: int
    features: tuple[str, ...]
    """Instructions of interest that the assembly has: mma.sync, wgmma, tcgen05, 128-bit loads and stores, mfma."""
    num_warps: int

    def faults(self) -> list[str]:
        """Why the kernel should not be shipped like this, in words; empty if nothing is wrong."""
        found = []
        if self.spill_bytes:
            found.append(
                f"{self.name} on {self.target} spills {self.spill_bytes} bytes: use more warps or smaller tiles"
            )
        limit = SHARED_BYTES_LIMIT.get(self.target)
        if limit is not None and self.shared_bytes > limit:
            found.append(
                f"{self.name} on {self.target} needs {self.shared_bytes} bytes of shared memory, {limit} is the most:"
                " use smaller tiles or fewer stages"
            )
        return found


def compile_case(case: AotCase, target: int | str) -> AotReport:
    """Compile for ``target``: 80, 90, 100 (NVIDIA's sm) or an AMD name such as "gfx942".

    Raises RuntimeError in a process with TRITON_INTERPRET, and ValueError if the case does not fit its kernel.
    """
    _check(case)
    if isinstance(target, int):
        return _compile_nvidia(case, target)
    return _compile_amd(case, target)


def _check(case: AotCase) -> None:
    names = getattr(case.kernel, "arg_names", None)
    if not hasattr(case.kernel, "cache_key"):
        raise RuntimeError(f"{case.name}: kernels of an interpreter can't be compiled; unset TRITON_INTERPRET")
    if list(case.signature) != list(names or ()):
        raise ValueError(f"{case.name}: the signature names {list(case.signature)}, the kernel has {names}")
    constants = {name for name, kind in case.signature.items() if kind == "constexpr"}
    if constants != set(case.constexprs):
        raise ValueError(f"{case.name}: values are given for {sorted(case.constexprs)}, needed are {sorted(constants)}")
    if unknown := set(case.aligned) - set(case.signature):
        raise ValueError(f"{case.name}: aligned names {sorted(unknown)}, which the kernel does not have")


def _compile_nvidia(case: AotCase, sm: int) -> AotReport:
    from triton import knobs
    from triton.backends.compiler import GPUTarget

    log = io.StringIO()
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        knobs.compilation.always_compile = True  # a cached kernel comes without the assembler's log
        knobs.nvidia.dump_ptxas_log = True
        compiled = _compile(case, GPUTarget("cuda", sm, 32))
    said = log.getvalue()
    return AotReport(
        name=case.name,
        target=f"sm_{sm}",
        registers=_number(r"Used (\d+) registers", said),
        spill_bytes=_number(r"(\d+) bytes spill stores", said) + _number(r"(\d+) bytes spill loads", said),
        stack_bytes=_number(r"(\d+) bytes stack frame", said),
        shared_bytes=compiled.metadata.shared,
        binary_bytes=len(compiled.asm["cubin"]),
        features=tuple(name for name, pattern in _FEATURES.items() if pattern.search(compiled.asm["ptx"])),
        num_warps=case.num_warps,
    )


def _compile_amd(case: AotCase, arch: str) -> AotReport:
    from triton.backends.compiler import GPUTarget

    compiled = _compile(case, GPUTarget("hip", arch, 64))
    text = compiled.asm["amdgcn"]
    return AotReport(
        name=case.name,
        target=arch,
        registers=_number(r"\.vgpr_count:\s+(\d+)", text),
        spill_bytes=4 * _number(r"\.vgpr_spill_count:\s+(\d+)", text),
        stack_bytes=_number(r"\.private_segment_fixed_size:\s+(\d+)", text),
        shared_bytes=compiled.metadata.shared,
        binary_bytes=len(compiled.asm["hsaco"]),
        features=tuple(
            name
            for name, pattern in (
                ("mfma", r"\bv_mfma_"),
                ("128-bit loads", r"\b(?:global|buffer)_load_dwordx4\b"),
                ("128-bit stores", r"\b(?:global|buffer)_store_dwordx4\b"),
            )
            if re.search(pattern, text)
        ),
        num_warps=case.num_warps,
    )


def _compile(case: AotCase, target: Any) -> Any:
    import triton
    from triton.compiler import ASTSource

    position = {name: (index,) for index, name in enumerate(case.signature)}
    source = ASTSource(
        case.kernel,
        case.signature,
        constexprs={position[name]: value for name, value in case.constexprs.items()},
        attrs={position[name]: _DIVISIBLE_BY_16 for name in case.aligned},
    )
    return triton.compile(source, target=target, options={"num_warps": case.num_warps, "num_stages": case.num_stages})


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"the compiler's output has no {pattern!r}: {text[:500]!r}")
    return int(found.group(1))
