"""Single passes of each tier over live sequences, to be timed."""

from __future__ import annotations

from collections.abc import Callable

from triforce_core.engine.engine import Engine
from triforce_core.engine.sequence import Request, Sequence
from triforce_core.errors import require
from triforce_core.messages import Claim, Proposal, Proposer, SamplingParams, Span, Work
from triforce_core.speculation.decoder import SpeculativeDecoder, Verifier


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


def drafting(proposer: Proposer, sequences: list[Sequence], tokens: int) -> Callable[[], object]:
    """A call that drafts so many tokens of each sequence."""
    work = [Work(newest(s), (tokens,)) for s in sequences]

    def draft() -> list[Proposal]:
        proposer.submit(work)
        return proposer.collect(0.0)

    assert all(proposal.tokens for proposal in draft()), "a sequence lacks something here"
    return draft
