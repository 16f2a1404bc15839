"""Drafting by a model: the half of the lowest tier (leaf.py) that needs one. Prompt lookup is in lookup.py.

A model drafts one continuation, or a tree of them: under shared noise the tier above draws one token at each position,
so several drafts of it cost no exactness. The most probable tokens are drafted, by their ranks and gaps
(calibration.py), and no further once a pass of the model costs more than what it is expected to give.
"""

from dataclasses import dataclass, field
from time import perf_counter

import torch

from triforce_core.kv.base import NO_TREE, Batch, Forward, Lack
from triforce_core.kv.streaming import StreamingKV
from triforce_core.messages import Origin, Proposal, SequenceSpec, Span, Tally, Tier, Tree, Work, wait_in_turn
from triforce_core.models.chain import RANKS, Chain
from triforce_core.models.drawing import NO_TOKEN, Drawer, LogitsOf, Ranked, by_sequence, ranking
from triforce_core.models.runner import ModelRunner
from triforce_core.sampling.grammars import Grammars
from triforce_core.speculation.calibration import Calibration

NODE = 0.125  # what one more token of a tree costs the tier above, relative to what a pass of the drafting model costs


@dataclass(slots=True)
class Draft:
    """What is drafted for one work."""

    work: Work
    most: int  # tokens of the tree; 0: a chain is drafted
    tree: Tree = NO_TREE
    chances: dict[int, float] = field(default_factory=lambda: {-1: 1.0})  # by token: that it and all before are drawn
    latest: list[int] = field(default_factory=lambda: [-1])  # the tokens of the last level, from which the next follows
    rankings: dict[int, Ranked] = field(default_factory=dict)  # by token: of those that may follow it
    depth: int = 0
    lack: Lack | None = None
    tally: Tally = field(default_factory=Tally)

    @property
    def chooses(self) -> bool:
        """Whether what is drafted, and how far, goes by chances."""
        return bool(self.most or self.work.least_gain)

    def forward(self) -> Forward:
        """What to forward for the next level. The KV of a continuation is kept, that of a tree is not."""
        span, tokens = self.work.span, self.tree.tokens
        if self.tree.is_chain:
            return Forward(statement(span, tokens), 1, len(tokens))
        stated = Span(span.sequence_id, span.end, ()) if span.end else span  # again: it may be a whole prompt
        return Forward(stated, len(self.latest), tree=self.tree)

    def extend(self, rankings: list[Ranked], calibration: Calibration, stops: tuple[int, ...]) -> None:
        """Add a level; `rankings` are those after each token of the last. Nothing follows the tokens `stops`."""
        self.rankings.update(zip(self.latest, rankings, strict=True))
        found = [
            (self.chances[before] * chance, before, token)
            for before, ranked in zip(self.latest, rankings, strict=True)
            if before < 0 or self.tree.tokens[before] not in stops
            for chance, (token, _) in zip(calibration.chances(ranked), ranked, strict=True)
        ]
        found.sort(key=lambda each: -each[0])
        least, first = NODE * self.work.least_gain, len(self.tree.tokens)
        room = max(1, self.most - first)
        chosen = [each for index, each in enumerate(found[:room]) if index == 0 or each[0] >= least]
        for index, (chance, before, token) in enumerate(chosen, first):
            self.tree = Tree((*self.tree.tokens, token), (*self.tree.parents, before))
            self.chances[index] = chance
        self.latest = [*range(first, first + len(chosen))]
        self.depth += 1

    def room(self, spec: SequenceSpec) -> int:
        """How many levels may follow, of which the verifying pass leaves one token of the text to itself."""
        return min(self.work.lookaheads[0], spec.max_length - 1 - self.work.span.end) - self.depth

    def goes_on(self, spec: SequenceSpec, first_right: float) -> bool:
        """Whether another level is worth a pass of the model. `first_right`: how often its first choice is right."""
        if self.most and len(self.tree.tokens) >= self.most:
            return False
        going = [self.chances[index] for index in self.latest if self.tree.tokens[index] not in spec.stop_token_ids]
        return bool(going) and self.room(spec) > 0 and sum(going) * first_right >= self.work.least_gain

    def proposal(self) -> Proposal:
        return Proposal(
            sequence_id=self.work.span.sequence_id,
            start=self.work.span.end,
            tokens=self.tree.tokens,
            parents=() if self.tree.is_chain else self.tree.parents,
            origins=bytes([Origin.DRAFT]) * len(self.tree.tokens),
            missing_from=self.lack.missing_from if self.lack else None,
            tallies=(self.tally,),
        )


class ModelProposer:
    """A model drafts one level after another, for all waiting sequences in one batch."""

    tier = Tier.DRAFT

    def __init__(self, runner: ModelRunner, grammars: Grammars | None = None) -> None:
        self.runner, self.drawer = runner, Drawer(runner, grammars, wait_for_grammars=False)
        self.waiting: dict[int, Work] = {}
        self.calibration = Calibration()
        self.drafted: dict[int, Draft] = {}  # by sequence id: the latest, from which the next work lets us learn

    def submit(self, work: list[Work]) -> None:
        wait_in_turn(self.waiting, work)

    def collect(self, timeout_s: float) -> list[Proposal]:
        """Draft for all waiting work. Takes as long as the model needs; `timeout_s` is not used."""
        most = self.runner.kv.most_nodes
        drafts = [Draft(work, min(work.nodes, most)) for work in self.waiting.values()]
        self.waiting = {}
        for draft in drafts:
            self._learn(draft.work.span)
        active = [draft for draft in drafts if draft.work.lookaheads[0]]
        ranked = any(draft.chooses for draft in active)
        while active:
            began = perf_counter()
            levels, batch = self.levels(active, ranked=ranked)
            took = perf_counter() - began
            steps = max(map(len, levels.values()), default=1)
            unfinished = []
            for draft in active:
                sequence_id = draft.work.span.sequence_id
                draft.lack = batch.lacking.get(sequence_id, draft.lack)
                if sequence_id not in levels:
                    continue
                spec, of_draft = self.runner.kv.held[sequence_id].spec, levels[sequence_id]
                draft.tally += Tally(passes=len(of_draft), busy_s=took * len(of_draft) / steps)
                for found in of_draft:
                    # One token is enough for a draft that does not choose: its neighbours in the pass change nothing.
                    own = found if draft.chooses else [each[:1] for each in found]
                    draft.extend(own, self.calibration, spec.stop_token_ids)
                    if not draft.goes_on(spec, self.calibration.first_right):
                        break
                else:
                    unfinished.append(draft)
            active = unfinished
        self.drafted.update({draft.work.span.sequence_id: draft for draft in drafts if draft.chooses})
        return [draft.proposal() for draft in drafts]

    def levels(self, drafts: list[Draft], *, ranked: bool) -> tuple[dict[int, list[list[Ranked]]], Batch]:
        """One pass, and where the device needs no host for them, the next ones. By sequence id and pass, for each token
        whose logits were asked for, what may follow it: the most probable tokens if `ranked`, else at least the first.
        """
        logits, batch = self.runner.forward([draft.forward() for draft in drafts])
        of_rows, found = by_sequence(logits, batch.rows), dict[int, list[list[Ranked]]]()
        wanted = self._ahead([draft for draft in drafts if draft.work.span.sequence_id in of_rows])
        chain = self.runner.shaped.chain(len(wanted)) if wanted and self.runner.shaped is not None else None
        if chain is not None:
            found = self._chained(chain, of_rows, wanted)
        others = {i: own for i, own in of_rows.items() if i not in found}
        if ranked:
            return found | {i: [own] for i, own in self.drawer.ranked(others, RANKS).items()}, batch
        drawn = self.drawer.draw(others)
        alone = {i: [[[(t, 0.0)] if t != NO_TOKEN else [] for t in tokens]] for i, tokens in drawn.items()}
        return found | alone, batch

    def _ahead(self, drafts: list[Draft]) -> dict[int, int]:
        """By sequence id, how many tokens to draw without the host, the most first: of drafts of which it need not see
        each token before the next, and of which more than one is wanted.
        """
        kv, numbers, most = self.runner.kv, dict[int, int](), self.runner.shaped.ahead if self.runner.shaped else 0
        for draft in drafts if most else ():
            assert isinstance(kv, StreamingKV)
            sequence_id = draft.work.span.sequence_id
            spec = kv.held[sequence_id].spec
            if not draft.most and not spec.edits_logits:
                numbers[sequence_id] = min(draft.room(spec), 1 + kv.room_ahead(sequence_id), most)
        return {i: number for i, number in sorted(numbers.items(), key=lambda each: -each[1]) if number > 1}

    def _chained(self, chain: Chain, logits: LogitsOf, wanted: dict[int, int]) -> dict[int, list[list[Ranked]]]:
        kv = self.runner.kv
        assert isinstance(kv, StreamingKV)
        began = perf_counter()
        found = chain.run(kv, torch.cat([logits[sequence_id] for sequence_id in wanted]), wanted)
        self.runner.seconds += perf_counter() - began
        self.runner.passes += len(found) - 1
        levels = dict[int, list[list[Ranked]]]()
        for row, (sequence_id, number) in enumerate(wanted.items()):
            temperature = kv.held[sequence_id].spec.sampling.temperature or 1.0
            steps = found[:number]
            levels[sequence_id] = [[ranking(tokens[row], values[row], temperature)] for values, tokens in steps]
        return levels

    def _learn(self, span: Span) -> None:
        """Learn from what the text has become after the latest draft, if it is as it was before it."""
        draft, at = self.drafted.pop(span.sequence_id, None), -1
        if draft is None or draft.work.span.end != span.start:
            return
        for token in span.tokens:
            if at not in draft.rankings:
                break
            self.calibration.learn(draft.rankings[at], token)
            child = draft.tree.child(at, token)
            if child is None:
                break
            at = child

    def release(self, sequence_ids: list[int]) -> None:
        for sequence_id in sequence_ids:
            self.waiting.pop(sequence_id, None)
            self.drafted.pop(sequence_id, None)
        self.runner.release(sequence_ids)
        self.drawer.release(sequence_ids)


def statement(span: Span, drafted: tuple[int, ...]) -> Span:
    """The span itself at first; later only the tokens drafted after it, because the span may be a whole prompt."""
    return Span(span.sequence_id, span.end, drafted) if drafted and span.end else span.extended(drafted)
