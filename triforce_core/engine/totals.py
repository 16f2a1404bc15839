"""What all requests of an engine have done together, for metrics."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from triforce_core.engine.sequence import Stats
from triforce_core.messages import Tally
from triforce_core.plans import Plan


@dataclass(slots=True)
class Totals:
    """Counts since the engine was made. They never decrease, not even when requests are cancelled or preempted."""

    # The rounds, snapshots and preemptions of all requests. The fields for times and for the latest plan have no
    # meaning here.
    stats: Stats = field(default_factory=Stats)
    rounds_by_tokens: dict[int, int] = field(default_factory=dict)  # rounds by the tokens that they committed
    # Tokens of prompts: those whose KV was found, and those that were prefilled. Requests that are resumed after a
    # failure are not counted.
    prefix_hit_tokens: int = 0
    prefix_miss_tokens: int = 0

    def add(self, plan: Plan, tallies: tuple[Tally, ...], tokens: int) -> None:
        """Add a round of the target that committed so many tokens."""
        self.stats.add(plan, tallies)
        self.rounds_by_tokens[tokens] = self.rounds_by_tokens.get(tokens, 0) + 1

    def read(self, hit_tokens: int, miss_tokens: int) -> None:
        """Add a request's prompt, once it has been read."""
        self.prefix_hit_tokens += hit_tokens
        self.prefix_miss_tokens += miss_tokens

    def copy(self) -> Totals:
        return replace(self, stats=self.stats.copy(), rounds_by_tokens=dict(self.rounds_by_tokens))
