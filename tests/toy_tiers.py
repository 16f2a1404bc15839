"""Tiers whose models are tables. They keep the protocol's rules, and check that the other tiers keep them."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.by_hand import NothingCached
from triforce_core.kv.prefix_tree import Cursor
from triforce_core.kv.ranges import RangeAllocator, size_of
from triforce_core.kv.selectors import MeanKey
from triforce_core.kv.snapshot import ChunkSettings, Snapshot
from triforce_core.messages import Claim, Proposal, SequenceSpec, Span, Tally, Tier, Tree, Verdict, Work, in_turn
from triforce_core.speculation.verification import judge

VOCAB = 5
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Law:
    """A model: the weights of the next token, given the whole text before it. A drafter's weights are mixed with the
    target's, which have this `share`.
    """

    seed: int
    target: Law | None = None
    share: float = 0.0

    @functools.lru_cache(maxsize=200_000)  # noqa: B019
    def weights(self, text: Tokens) -> Tokens | tuple[float, ...]:
        rng = random.Random(f"{self.seed}/{text}")
        own = [rng.random() ** 3 + 0.01 for _ in range(VOCAB)]
        if self.target is None:
            return tuple(w / sum(own) for w in own)
        theirs = self.target.weights(text)
        return tuple((1 - self.share) * w / sum(own) + self.share * t for w, t in zip(own, theirs, strict=True))

    def draw(self, text: Tokens, spec: SequenceSpec) -> int:
        """argmax(log p / T + g), with Gumbel noise g of (seed, position, token), the same in every tier."""
        weights, temperature = self.weights(text), spec.sampling.temperature
        if not temperature:
            return max(range(VOCAB), key=weights.__getitem__)

        def perturbed(token: int) -> float:
            uniform = random.Random(f"{spec.seed}/{len(text)}/{token}").random()
            return math.log(weights[token]) / temperature - math.log(-math.log(uniform))

        return max(range(VOCAB), key=perturbed)

    def plain(self, text: Tokens, spec: SequenceSpec) -> Tokens:
        """Decode plainly: this is the text that every request must get."""
        while len(text) < spec.max_length:
            text += (self.draw(text, spec),)
            if text[-1] in spec.stop_token_ids:
                break
        return text


class Settled:
    """The final text of each sequence. A tier that holds anything else in the settled part of a sequence is in
    error.
    """

    def __init__(self) -> None:
        self.text: dict[int, Tokens] = {}

    def check(self, sequence_id: int, held: list[int], end: int) -> None:
        assert tuple(held[:end]) == self.text[sequence_id][:end], f"a tier works on a wrong text before {end}"


class ToyTier:
    """A Verifier over a table. It holds sequences as they were last stated, by the align rule."""

    def __init__(self, law: Law, tier: Tier, settled: Settled) -> None:
        self.law, self.tier, self.settled = law, tier, settled
        self.held: dict[int, list[int]] = {}
        self.specs: dict[int, SequenceSpec] = {}

    def align(self, span: Span) -> int | None:
        """Take a span. Return None, or the position from which the sequence is missing."""
        if span.start == 0:
            assert span.spec is not None, "a span from 0 carries the spec"
            self.specs[span.sequence_id] = span.spec
        held = self.held.setdefault(span.sequence_id, []) if span.start == 0 else self.held.get(span.sequence_id, [])
        if span.start > len(held):
            return len(held)
        held[span.start :] = span.tokens
        if self.tier != Tier.DRAFT:  # what the retrieval tier tells it may turn out wrong, and is then told anew
            self.settled.check(span.sequence_id, held, span.start)
        return None

    def verify(self, claims: list[Claim]) -> list[Verdict]:
        assert len({c.span.sequence_id for c in claims}) == len(claims), "one claim a sequence"
        return [self.judge(c) for c in claims]

    def judge(self, claim: Claim) -> Verdict:
        if (missing := self.align(claim.span)) is not None:
            return Verdict(missing_from=missing)
        if not claim.sample:
            return Verdict()
        sequence_id = claim.span.sequence_id
        held = self.held[sequence_id]
        text, spec, tree = tuple(held), self.specs[sequence_id], claim.tree
        assert not claim.parents or self.tier == Tier.RETRIEVAL, "no other tier verifies trees"
        if not claim.parents:  # the KV of a tree is not kept
            held += claim.proposed
        assert len(held) <= self.room(sequence_id), "stated beyond its slots"
        own = [self.law.draw(text + tuple(tree.path(node)), spec) for node in range(-1, len(tree.tokens))]
        return judge(own, claim, spec)

    def room(self, sequence_id: int) -> float:
        return float("inf")

    def release(self, sequence_ids: list[int]) -> None:
        for sequence_id in sequence_ids:
            self.held.pop(sequence_id, None)
            self.specs.pop(sequence_id, None)


class ToyTarget(ToyTier):
    """The target, which is also the engine's pool, from which snapshots are cut."""

    def __init__(self, law: Law, settled: Settled, num_slots: int) -> None:
        super().__init__(law, Tier.TARGET, settled)
        self.allocator = RangeAllocator(num_slots)
        self.ranges: dict[int, Any] = {}
        self.cuts = itertools.count(1)

    kept_tokens = dropped_tokens = 0

    @property
    def used_tokens(self) -> int:
        return self.allocator.num_slots - self.allocator.num_free

    def look(self, spec: SequenceSpec, text: list[int]) -> None:
        """This pool shares nothing."""

    def matched(self, cursor: Cursor) -> int:
        raise AssertionError("nothing was looked for")

    def can_open(self, spec: SequenceSpec, tokens: int, cursor: Cursor | None) -> bool:
        return tokens <= self.allocator.num_free

    def open(self, sequence_id: int, spec: SequenceSpec, tokens: int, text: list[int]) -> NothingCached:
        self.ranges[sequence_id] = self.allocator.allocate(tokens)
        assert self.ranges[sequence_id] is not None, "admitted without room"
        return NothingCached()

    def grow(self, sequence_id: int, tokens: int) -> bool:
        more = self.allocator.allocate(max(0, tokens - size_of(self.ranges[sequence_id])))
        if more is not None:
            self.ranges[sequence_id] += more
        return more is not None

    def keys_after(self, tokens: int) -> int:
        return tokens

    def hemmed_in(self, sequence_id: int) -> bool:
        return False

    def room(self, sequence_id: int) -> float:
        return size_of(self.ranges[sequence_id])

    def cut(self, sequence_id: int, position: int, chunks: ChunkSettings, selector: MeanKey, base: int) -> Snapshot:
        assert 0 < position <= len(self.held[sequence_id]), "a snapshot is cut of what is held"
        self.settled.check(sequence_id, self.held[sequence_id], position)
        return Snapshot(sequence_id, next(self.cuts), position, torch.empty(0), torch.empty(0))

    def release(self, sequence_ids: list[int]) -> None:
        super().release(sequence_ids)
        for sequence_id in sequence_ids:
            self.allocator.free(self.ranges.pop(sequence_id, []))


class ToyRetrieval(ToyTier):
    """The retrieval tier. It works only with a snapshot, and at most `tail` tokens beyond it."""

    def __init__(self, law: Law, settled: Settled, tail: int, events: Counter[str]) -> None:
        super().__init__(law, Tier.RETRIEVAL, settled)
        self.tail, self.events = tail, events
        self.position: dict[int, int] = {}

    def judge(self, claim: Claim) -> Verdict:
        if (missing := self.align(claim.span)) is not None:
            return Verdict(missing_from=missing)
        position = self.position.get(claim.span.sequence_id)
        if position is None or claim.span.end + len(claim.proposed) - position > self.tail:
            self.events["retrieval: tail full" if position else "retrieval: no snapshot yet"] += 1
            return Verdict(snapshot_wanted=True)
        if claim.span.end - 1 < position:
            self.events["retrieval: late statement"] += 1
            return Verdict()
        return super().judge(claim)

    def release(self, sequence_ids: list[int]) -> None:
        super().release(sequence_ids)
        for sequence_id in sequence_ids:
            self.position.pop(sequence_id, None)


class ToyDrafts:
    """The leaf."""

    def __init__(self, tier: ToyTier) -> None:
        self.tier = tier
        self.waiting: dict[int, Work] = {}
        self.texts: dict[tuple[int, int], Tokens] = {}  # what was continued, by sequence and length

    def submit(self, work: list[Work]) -> None:
        for w in work:
            replaced = self.waiting.get(w.span.sequence_id)
            span = in_turn(replaced.span, w.span) if replaced else w.span
            self.waiting[w.span.sequence_id] = replace(w, span=span)

    def collect(self, timeout_s: float) -> list[Proposal]:
        work, self.waiting = self.waiting, {}
        return [self.with_siblings(self.draft(w.span, w.lookaheads), w.lookaheads[0], w.nodes) for w in work.values()]

    def with_siblings(self, proposal: Proposal, deepest: int, most: int) -> Proposal:
        """A tree with the proposed tokens and others anywhere, equal siblings among them."""
        rng = random.Random(f"{proposal.sequence_id}/{proposal.start}/{most}")
        tokens, parents = [*proposal.tokens], [*range(-1, len(proposal.tokens) - 1)]
        if not tokens or len(tokens) >= most:
            return proposal
        for _ in range(rng.randrange(most - len(tokens) + 1)):
            depths = Tree(tuple(tokens), tuple(parents)).depths
            parents.append(rng.choice([-1, *(node for node, depth in enumerate(depths) if depth + 1 < deepest)]))
            tokens.append(rng.randrange(VOCAB))
        return replace(proposal, tokens=tuple(tokens), parents=tuple(parents), origins=bytes(len(tokens)))

    def draft(self, span: Span, lookaheads: tuple[int, ...]) -> Proposal:
        assert len(lookaheads) == 1, "the leaf is the last level"
        if (missing := self.tier.align(span)) is not None:
            return Proposal(span.sequence_id, span.end, missing_from=missing)
        tokens: Tokens = ()
        held, spec = self.tier.held[span.sequence_id], self.tier.specs[span.sequence_id]
        self.texts[span.sequence_id, span.end] = tuple(held)
        while len(tokens) < lookaheads[0] and len(held) < spec.max_length and not set(tokens) & {*spec.stop_token_ids}:
            tokens += (self.tier.law.draw(tuple(held), spec),)
            held.append(tokens[-1])
        return Proposal(span.sequence_id, span.end, tokens, bytes(len(tokens)), tallies=(Tally(),))

    def release(self, sequence_ids: list[int]) -> None:
        for sequence_id in sequence_ids:
            self.waiting.pop(sequence_id, None)
        self.tier.release(sequence_ids)


class SlowSink:
    """Hands snapshots over some turns later, to whatever retrieval tier lives by then; some never arrive."""

    def __init__(self, rng: random.Random, faults: float) -> None:
        self.rng, self.faults = rng, faults
        self.retrieval: ToyRetrieval | None = None
        self.on_the_way: dict[int, list[int]] = {}  # sequence → turns left, position

    def deliver(self, snapshot: Snapshot) -> None:
        self.on_the_way[snapshot.sequence_id] = [self.rng.choice([0, 0, 1, 5]), snapshot.position]

    def busy(self, sequence_id: int) -> bool:
        return sequence_id in self.on_the_way

    def confirmed(self, sequence_id: int) -> int:
        return 0

    def turn(self) -> None:
        for sequence_id, way in list(self.on_the_way.items()):
            way[0] -= 1
            if way[0] < 0:
                del self.on_the_way[sequence_id]
                if self.retrieval is not None and self.rng.random() >= self.faults:
                    self.retrieval.position[sequence_id] = way[1]
