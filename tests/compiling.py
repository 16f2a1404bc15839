"""What tests of compiled functions share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler


def has_a_compiler() -> bool:
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


needs_a_compiler = pytest.mark.skipif(not has_a_compiler(), reason="torch.compile finds no C++ compiler here")


@contextmanager
def nothing_compiles() -> Iterator[None]:
    """In the body, compiling anything is an error."""
    with torch.compiler.set_stance("fail_on_recompile"):
        yield
