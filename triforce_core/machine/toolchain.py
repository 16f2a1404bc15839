"""What compiling for a GPU needs of a machine: Triton builds a launcher in C for each kernel, against Python's headers.

Looked for before anything is compiled, because the compiler's own message is hundreds of lines that do not say it.
"""

import os
import shutil
import sysconfig
from pathlib import Path

COMPILERS = ("clang", "gcc", "cc")  # where CC is not set


def lacking(device_type: str) -> str | None:
    """What this machine lacks; None if nothing, or for a CPU, whose compiler torch looks for itself."""
    if device_type != "cuda":
        return None
    named = os.environ.get("CC")
    if not any(map(shutil.which, [named] if named else COMPILERS)):
        return f"there is no C compiler {named}, which CC names" if named else "there is no C compiler: install gcc"
    if not any((directory / "Python.h").is_file() for directory in header_directories()):
        return "Python.h is not there: install python3-dev"
    return None


def header_directories() -> list[Path]:
    """Where the compiler finds Python's headers."""
    scheme = sysconfig.get_default_scheme()
    scheme = "posix_prefix" if scheme == "posix_local" else scheme  # Debian's has no headers
    more = [path for name in ("CPATH", "C_INCLUDE_PATH") for path in os.environ.get(name, "").split(os.pathsep)]
    return [Path(path) for path in (sysconfig.get_paths(scheme=scheme)["include"], *more) if path]
