"""A target that dies when it gets a certain prompt. The processes of a test's server run this file, because its folder
is in their PYTHONPATH.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import signal
import sys
from typing import Any

PATCHED = "triforce_core.speculation.verification"
DEADLY = (11, 13, 11, 13, 11)  # the first tokens of the prompt


class Poison(importlib.abc.MetaPathFinder):
    """Wraps the module's loading, and steps aside."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != PATCHED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            poison(module.ModelVerifier)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def poison(verifier: Any) -> None:
    verify = verifier.verify

    def deadly(self: Any, claims: list[Any]) -> Any:
        if self.tier.name == "TARGET" and any(tuple(claim.span.tokens[:5]) == DEADLY for claim in claims):
            os.kill(os.getpid(), signal.SIGKILL)
        return verify(self, claims)

    verifier.verify = deadly


if __name__ == "sitecustomize":  # a test imports it for the prompt alone
    sys.meta_path.insert(0, Poison())
