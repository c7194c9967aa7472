"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def atomic_writer(path: str | Path) -> Iterator[TextIO]:
    """A text file (UTF-8) that takes its name only once it is complete.

    It is written under a temporary name in the same folder and then renamed, so that a reader, or a full disk, never
    leaves half a report under the final name.  A link keeps pointing to it; a device or pipe is written to directly.
    Raises OSError, naming ``path``, if it cannot be written there.
    """
    target = Path(path).resolve() if Path(path).is_symlink() else Path(path)
    if target.exists() and not target.is_file() and not target.is_dir():
        with target.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            yield file
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("x", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            yield file
        os.replace(temporary, target)
    except OSError as error:
        raise type(error)(error.errno, f"cannot write {target}: {error.strerror}", str(target)) from error
    finally:
        temporary.unlink(missing_ok=True)
