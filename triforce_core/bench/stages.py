"""The time of one pass of each tier with nothing else running. These times calibrate the simulator."""

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
REST_S = 0.05  # pause before each pass, as while other tiers work: after a pause a core is up to a quarter slower


def stage_times(settings: Settings, prompts: list[tuple[int, ...]], sampling: SamplingParams) -> dict[str, Any]:
    """`{tier: [{batch, tokens, ms}, …]}`: median times of passes on sequences that have decoded a few tokens.

    The largest batch is the number of prompts, at most 8. All tiers run in this process. Raises `InvalidValueError` for
    a drafter without a model.
    """
    rule = "must be a model: prompt lookup runs no passes that could be timed"
    require(drafter_weights(settings) is not None, "draft.model", settings.draft.model, rule)
    engine = load_local_engine(settings.cold)
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
    """Start these prompts; returns the live sequences once all tiers hold each of them."""
    for prompt in prompts:
        engine.submit(Request(prompt, max_tokens=1024, sampling=sampling, seed=0, lookaheads=lookaheads))
    decoded: dict[int, int] = {}
    while len(decoded) < len(prompts) or min(decoded.values()) < 24:
        for output in engine.run_once():
            decoded[output.sequence_id] = output.stats.decoded
    live = list(engine.scheduler.live.values())
    rule = (
        "are not decoded together: the first had all its tokens before the last prompt was read; give fewer or shorter"
    )
    require(len(live) == len(prompts), "requests", len(prompts), rule)
    return live


def level_below(decoder: Proposer) -> Proposer:
    assert isinstance(decoder, SpeculativeDecoder)
    return decoder.proposer


def newest(sequence: Sequence) -> Span:
    """A span of the last 32 tokens, more than a tier can lack; the tier forwards only those that it lacks."""
    end = len(sequence.tokens)
    start = max(1, end - 32)
    return Span(sequence.sequence_id, start, tuple(sequence.tokens[start:]))


def verifying(verifier: Verifier, sequences: list[Sequence], tokens: int) -> Callable[[], object]:
    """A call that verifies `tokens` - 1 proposed tokens of each sequence."""
    claims = [Claim(newest(s), tuple(s.tokens[: tokens - 1])) for s in sequences]
    assert all(verdict.tokens for verdict in verifier.verify(claims)), "a sequence lacks something here"
    return lambda: verifier.verify(claims)


def drafting(proposer: Proposer, sequences: list[Sequence]) -> Callable[[], object]:
    """A call that drafts one token of each sequence."""
    work = [Work(newest(s), (1,)) for s in sequences]

    def draft() -> list[Proposal]:
        proposer.submit(work)
        return proposer.collect(0.0)

    assert all(proposal.tokens for proposal in draft()), "a sequence lacks something here"
    return draft


def median_ms(passes: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median milliseconds of each kind of pass. The kinds alternate, as in decoding, so that each pass finds the CPU's
    caches as a pass of another kind has left them.
    """
    times: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(PASSES + 1):
        for name, run in passes.items():
            time.sleep(REST_S)
            begin = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begin)
    return {name: 1e3 * statistics.median(taken[1:]) for name, taken in times.items()}
