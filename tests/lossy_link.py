"""A link to a tier elsewhere, at its worst, in one process: what a remote proposer may do to the level above.

Its contract: every Work gets an answer, an empty one when the peer is late, lost the Work, or died. An answer may come
late (after an empty one was given in its place), twice, split from its batch, or out of order.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from triforce_core.messages import Proposal, Proposer, Work


@dataclass(slots=True)
class Owed:
    work: Work
    since: int  # turns of the link


class LossyLink:
    """A Proposer over a peer that is made anew whenever it dies; `faults` is the chance of each mishap."""

    def __init__(
        self,
        make_peer: Callable[[], Proposer],
        rng: random.Random,
        events: Counter[str],
        *,
        faults: float,
        patience: int,
    ) -> None:
        self.make_peer, self.rng, self.events, self.faults, self.patience = make_peer, rng, events, faults, patience
        self.peer = make_peer()
        self.turns = 0
        self.owed: dict[int, Owed] = {}
        self.outgoing: list[Work] = []  # a stream: order is kept, batches are not
        self.incoming: list[Proposal] = []

    def submit(self, work: list[Work]) -> None:
        for w in work:
            self.owed[w.span.sequence_id] = Owed(w, self.turns)
            if self._mishap("link: work lost"):
                continue
            self.outgoing.append(w)

    def collect(self, timeout_s: float) -> list[Proposal]:
        self.turns += 1
        assert self.turns < 100_000, "nobody ends this conversation"
        if self.rng.random() < self.faults / 3:
            return self._restart()
        sent = self.rng.randint(0, len(self.outgoing))
        self.peer.submit(self.outgoing[:sent])
        del self.outgoing[:sent]
        for proposal in self.peer.collect(timeout_s):
            if self._mishap("link: answer lost"):
                continue
            self.incoming += [proposal] * (1 + self._mishap("link: answer twice"))
        self.rng.shuffle(self.incoming)
        ready = round(self.rng.random() * len(self.incoming))
        answers, self.incoming = self.incoming[:ready], self.incoming[ready:]
        for p in answers:
            owed = self.owed.get(p.sequence_id)
            if owed and owed.work.span.end == p.start:
                del self.owed[p.sequence_id]
            else:
                self.events["link: answer late or repeated"] += 1
        late = [o for o in self.owed.values() if self.turns - o.since > self.patience]
        return answers + [self._give_up(o) for o in late]

    def _mishap(self, name: str) -> bool:
        happens = self.rng.random() < self.faults
        self.events[name] += happens
        return happens

    def _restart(self) -> list[Proposal]:
        self.events["link: peer restarted"] += 1
        self.peer = self.make_peer()
        self.outgoing.clear()
        self.incoming.clear()
        return [self._give_up(o) for o in list(self.owed.values())]

    def _give_up(self, owed: Owed) -> Proposal:
        """Return an empty answer, which says that the tier below may not have heard this statement."""
        self.events["link: gave up waiting"] += 1
        span = owed.work.span
        del self.owed[span.sequence_id]
        return Proposal(span.sequence_id, span.end, missing_from=self.rng.choice([0, span.start, span.start]))

    def release(self, sequence_ids: list[int]) -> None:
        self.outgoing = [w for w in self.outgoing if w.span.sequence_id not in sequence_ids]
        for sequence_id in sequence_ids:
            self.owed.pop(sequence_id, None)
        self.peer.release(sequence_ids)
