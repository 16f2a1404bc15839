"""Upper bounds on the throughput, by the formulas of docs/simulate.md. They ignore failures, prefills and queueing."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from triforce_core.messages import Tier
from triforce_core.simulate.scenario import Scenario
from triforce_core.simulate.stage_times import StageTimes


def expected_tokens(alpha: float, lookahead: int) -> float:
    """E(α, γ) = (1 − α^(γ+1)) / (1 − α): expected tokens from a round over γ proposed tokens."""
    return float(sum(alpha**i for i in range(lookahead + 1)))


@dataclass(frozen=True, slots=True)
class BlockLengths:
    """The distribution of retrieval block lengths; rounds are never cut."""

    rounds: float  # expected inner rounds of a block
    lengths: dict[int, float]  # probability of each block length, tokens

    @property
    def mean_length(self) -> float:
        return sum(length * p for length, p in self.lengths.items())


def block_lengths(lookahead: int, draft_lookahead: int, alpha: float) -> BlockLengths:
    """The lengths of blocks that grow by rounds of 1 to γ1 + 1 tokens until they have at least γ2: a renewal process.

    `lookahead` is γ2, `draft_lookahead` γ1, and `alpha` the chance that a draft token is accepted.
    """
    if lookahead == 0:
        return BlockLengths(0.0, {0: 1.0})
    gains = {1 + n: alpha**n * (1 - alpha) for n in range(draft_lookahead)}
    gains[1 + draft_lookahead] = alpha**draft_lookahead
    reached = [1.0] + [0.0] * (lookahead + draft_lookahead)
    for tokens in range(lookahead):
        for gain, p in gains.items():
            reached[tokens + gain] += reached[tokens] * p
    lengths = {n: reached[n] for n in range(lookahead, lookahead + draft_lookahead + 1)}
    return BlockLengths(sum(reached[:lookahead]), lengths)


def replica_bound(scenario: Scenario, users: int) -> float:
    """Most tokens per second of one replica that decodes `users` requests at once.

    N is the number of users, m that of micro-batches, and b = ⌈N/m⌉. D = n (γ1 t1 + t2 + r12) is the time to draft a
    block in n rounds, L = D + t3 + r23 the time of its whole cycle, and d_max the longest time that a device works on a
    block: X ≤ E2 · min(N / L, b / d_max). Run-ahead with N < m replaces L by h · max(t3, D) + (1 − h) L, where h is the
    chance of a right guess.
    """
    if not users:
        return 0.0
    retrieval, draft = scenario.lookaheads
    blocks = block_lengths(retrieval, draft, scenario.acceptance.draft)
    alpha = scenario.acceptance.retrieval
    tokens = sum(p * expected_tokens(alpha, length) for length, p in blocks.lengths.items())
    batch = ceil(users / scenario.micro_batches)
    load = scenario.load
    context = sum(load.prompt_tokens) / len(load.prompt_tokens) + sum(load.output_tokens) / len(load.output_tokens) / 2

    def seconds(tier: Tier, query_tokens: float) -> float:
        return StageTimes(scenario.stages.of(tier)).ms(batch, query_tokens, context) / 1e3

    work = {Tier.TARGET: seconds(Tier.TARGET, 1 + blocks.mean_length)}  # seconds of each tier per block
    if retrieval:
        work[Tier.RETRIEVAL] = blocks.rounds * seconds(Tier.RETRIEVAL, 1 + draft)
    if draft:
        work[Tier.DRAFT] = blocks.rounds * draft * seconds(Tier.DRAFT, 1)

    def round_trip_s(upper: Tier, lower: Tier) -> float:
        seconds, jitter_s = scenario.link_s(upper, lower)
        return 2 * seconds + jitter_s  # two messages, whose jitter is jitter_s / 2 on average

    trips = blocks.rounds * round_trip_s(Tier.RETRIEVAL, Tier.DRAFT) if draft else 0.0
    drafting = sum(s for tier, s in work.items() if tier is not Tier.TARGET) + trips
    cycle = drafting + work[Tier.TARGET]
    if retrieval:
        cycle += round_trip_s(Tier.TARGET, Tier.RETRIEVAL)
    if scenario.run_ahead and users < scenario.micro_batches:
        right = sum(p * alpha ** (length + 1) for length, p in blocks.lengths.items())
        cycle = right * max(work[Tier.TARGET], drafting) + (1 - right) * cycle
    busiest = max(sum(work[tier] for tier in device) for device in scenario.devices)
    return tokens * min(users / cycle, batch / busiest)


def bound_tokens_per_s(scenario: Scenario) -> float:
    """Most tokens per second of all replicas."""
    return sum(replica_bound(scenario, scenario.users_of(replica)) for replica in range(scenario.replicas))
