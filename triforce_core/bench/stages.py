"""What one pass of each tier takes by itself, with nothing else running: what the simulator is calibrated with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from triforce_core.config import Settings
from triforce_core.decoder import SpeculativeDecoder, Verifier
from triforce_core.engine.drafters import drafter_weights
from triforce_core.engine.engine import Engine
from triforce_core.engine.loading import load_local_engine
from triforce_core.engine.sequence import Request, Sequence
from triforce_core.errors import require
from triforce_core.messages import Claim, Proposal, Proposer, SamplingParams, Span, Tier, Work

TOKENS = (1, 3, 5, 9, 17)  # query tokens of a pass, for each sequence
PASSES = 9
REST_S = 0.05  # before each pass, as while other tiers work: a core that has rested is up to a quarter slower


def stage_times(settings: Settings, prompts: list[tuple[int, ...]], sampling: SamplingParams) -> dict[str, Any]:
    """`{tier: [{batch, tokens, ms}, …]}`: medians over passes on sequences that have decoded a little.

    Batches go up to the number of prompts. All tiers are in this process.
    """
    require(drafter_weights(settings) is not None, "draft.model", settings.draft.model, "has no steps that take time")
    engine = load_local_engine(settings)
    sequences = decoding(engine, prompts, settings.speculation.effective, sampling)
    retrieval = level_below(engine.decoder)
    assert isinstance(engine.decoder, SpeculativeDecoder)
    assert isinstance(retrieval, SpeculativeDecoder)
    batches = [n for n in (1, 2, 3, 4, 6, 8) if n <= len(sequences)]
    points: dict[str, list[dict[str, Any]]] = {tier.name.lower(): [] for tier in Tier}
    for batch in batches:
        some = sequences[:batch]
        for tokens in TOKENS:
            passes = {
                "draft": drafting(retrieval.proposer, some),
                "retrieval": verifying(retrieval.verifier, some, tokens),
                "target": verifying(engine.decoder.verifier, some, tokens),
            }
            for tier, ms in median_ms(passes).items():
                if tier != "draft" or tokens == TOKENS[0]:
                    points[tier].append({"batch": batch, "tokens": 1 if tier == "draft" else tokens, "ms": ms})
    return points


def decoding(
    engine: Engine, prompts: list[tuple[int, ...]], lookaheads: tuple[int, int], sampling: SamplingParams
) -> list[Sequence]:
    """Live sequences, each of which every tier holds."""
    for prompt in prompts:
        engine.submit(Request(prompt, max_tokens=1024, sampling=sampling, seed=0, lookaheads=lookaheads))
    decoded: dict[int, int] = {}
    while len(decoded) < len(prompts) or min(decoded.values()) < 24:
        for output in engine.run_once():
            decoded[output.sequence_id] = output.stats.decoded
    return list(engine.scheduler.live.values())


def level_below(decoder: Proposer) -> Proposer:
    assert isinstance(decoder, SpeculativeDecoder)
    return decoder.proposer


def newest(sequence: Sequence) -> Span:
    """A statement of the last tokens: as many as a tier may lack, of which it forwards those that it does."""
    end = len(sequence.tokens)
    start = max(1, end - 32)
    return Span(sequence.sequence_id, start, tuple(sequence.tokens[start:]))


def verifying(verifier: Verifier, sequences: list[Sequence], tokens: int) -> Callable[[], object]:
    """Judging `tokens` - 1 proposed tokens of each sequence."""
    claims = [Claim(newest(s), tuple(s.tokens[: tokens - 1])) for s in sequences]
    assert all(verdict.tokens for verdict in verifier.verify(claims)), "a sequence lacks something here"
    return lambda: verifier.verify(claims)


def drafting(proposer: Proposer, sequences: list[Sequence]) -> Callable[[], object]:
    """One step."""
    work = [Work(newest(s), (1,)) for s in sequences]

    def draft() -> list[Proposal]:
        proposer.submit(work)
        return proposer.collect(0.0)

    assert all(proposal.tokens for proposal in draft()), "a sequence lacks something here"
    return draft


def median_ms(passes: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Of each kind; they alternate, as they do in decoding, so that none finds the caches as it left them."""
    times: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(PASSES + 1):
        for name, run in passes.items():
            time.sleep(REST_S)
            begin = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begin)
    return {name: 1e3 * statistics.median(taken[1:]) for name, taken in times.items()}
