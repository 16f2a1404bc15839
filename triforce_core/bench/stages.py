"""What one pass of each tier takes by itself, with nothing else running: what the simulator is calibrated with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from triforce_core.config import Settings
from triforce_core.decoder import SpeculativeDecoder, Verifier
from triforce_core.engine.assembly import load_local_engine
from triforce_core.engine.engine import Engine
from triforce_core.engine.sequence import Request, Sequence
from triforce_core.messages import Claim, Proposer, SamplingParams, Span, Tier, Work

TOKENS = (1, 3, 5, 9, 17)  # query tokens of a pass, for each sequence
PASSES = 9


def stage_times(settings: Settings, prompts: list[tuple[int, ...]], sampling: SamplingParams) -> dict[str, Any]:
    """`{tier: [{batch, tokens, ms}, …]}`: medians over passes on sequences that have decoded a little.

    Batches go up to the number of prompts. All tiers are in this process.
    """
    engine = load_local_engine(settings)
    sequences = decoding(engine, prompts, settings.speculation.effective, sampling)
    retrieval = level_below(engine.decoder)
    assert isinstance(engine.decoder, SpeculativeDecoder)
    assert isinstance(retrieval, SpeculativeDecoder)
    batches = [n for n in (1, 2, 3, 4, 6, 8) if n <= len(sequences)]
    points: dict[str, list[dict[str, Any]]] = {tier.name.lower(): [] for tier in Tier}
    for batch in batches:
        some = sequences[:batch]
        points["draft"].append({"batch": batch, "tokens": 1, "ms": draft_ms(retrieval.proposer, some)})
        for tokens in TOKENS:
            for tier, verifier in (("retrieval", retrieval.verifier), ("target", engine.decoder.verifier)):
                points[tier].append({"batch": batch, "tokens": tokens, "ms": verify_ms(verifier, some, tokens)})
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
    """A statement of the last token: what a tier must forward to go on."""
    end = len(sequence.tokens)
    return Span(sequence.sequence_id, end - 1, (sequence.tokens[-1],))


def verify_ms(verifier: Verifier, sequences: list[Sequence], tokens: int) -> float:
    """Judging `tokens` - 1 proposed tokens of each sequence."""
    claims = [Claim(newest(s), tuple(s.tokens[: tokens - 1])) for s in sequences]
    return median_ms(lambda: verifier.verify(claims))


def draft_ms(proposer: Proposer, sequences: list[Sequence], steps: int = 3) -> float:
    """One step of several."""

    def draft() -> None:
        proposer.submit([Work(newest(s), (steps,)) for s in sequences])
        proposer.collect(0.0)

    return median_ms(draft) / steps


def median_ms(run: Callable[[], object]) -> float:
    times = []
    for _ in range(PASSES + 1):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times[1:])
