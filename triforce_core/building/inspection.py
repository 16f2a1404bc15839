"""The parts of a chain in one process: its levels, their runners, and the sequences that each level holds."""

from collections.abc import Iterator, Sized
from typing import Any

from triforce_core.building.drafters import Drafter
from triforce_core.engine.engine import Engine
from triforce_core.messages import Proposer, Tier
from triforce_core.models.audit import AuditCounts
from triforce_core.models.fuse import is_fused
from triforce_core.models.runner import ModelRunner
from triforce_core.speculation.decoder import SpeculativeDecoder
from triforce_core.speculation.verification import ModelVerifier


def levels_of(engine: Engine) -> Iterator[ModelVerifier | Drafter]:
    """The verifier or drafter of each tier in this process, from the target down."""
    level: Proposer = engine.decoder
    while isinstance(level, SpeculativeDecoder):
        assert isinstance(level.verifier, ModelVerifier)
        yield level.verifier
        level = level.proposer
    if isinstance(level, Drafter):
        yield level


def audit_of(engine: Engine) -> AuditCounts | None:
    """What audits of the target have found so far; None where none are asked for."""
    target = next(levels_of(engine))
    return target.audit.counts if isinstance(target, ModelVerifier) and target.audit else None


def runners_of(engine: Engine) -> dict[Tier, ModelRunner]:
    """The runner of each tier that has a model."""
    return {level.tier: level.runner for level in levels_of(engine) if level.runner is not None}


def kernels_of(runner: ModelRunner) -> dict[str, Any]:
    """Whether its model runs fused kernels, and how many passes of constant shape it has."""
    return {"fused": is_fused(runner.model), "shapes": len(runner.shaped.passes) if runner.shaped else 0}


def held_of(engine: Engine) -> dict[Tier, Sized]:
    """The sequences that each tier holds."""
    return {level.tier: level.held for level in levels_of(engine)}
