"""The first token needs nothing but the target: no tier below is asked, and no snapshot is cut, before it has left."""

from __future__ import annotations

import pytest

from tests.by_hand import Below, NothingCached
from triforce_core.engine.engine import Engine
from triforce_core.engine.limits import Limits
from triforce_core.engine.scheduler import Scheduler
from triforce_core.engine.sequence import Request, Sequence
from triforce_core.kv.prefix_tree import Cursor
from triforce_core.messages import GREEDY, Proposal, SequenceSpec, Tally, Work

PROMPT = tuple(range(10, 20))
LIMITS = Limits(context_length=100, kv_pool_tokens=200, vocab_size=100)


class Room:
    """A pool that has room for all."""

    used_tokens = kept_tokens = dropped_tokens = 0

    def look(self, spec: SequenceSpec, text: list[int]) -> None:
        """This pool shares nothing."""

    def matched(self, cursor: Cursor) -> int:
        raise AssertionError("nothing was looked for")

    def can_open(self, spec: SequenceSpec, tokens: int, cursor: Cursor | None) -> bool:
        return True

    def open(self, sequence_id: int, spec: SequenceSpec, tokens: int, text: list[int]) -> NothingCached:
        return NothingCached()

    def keys_after(self, tokens: int) -> int:
        return tokens

    def hemmed_in(self, sequence_id: int) -> bool:
        return False

    def grow(self, sequence_id: int, tokens: int) -> bool:
        return True


class Policy:
    """Notes, at each update, how long the sequence is and whether a snapshot is wanted."""

    selector = "mean_key"

    def __init__(self) -> None:
        self.updates: list[tuple[int, bool]] = []

    def saw(self, sequence: Sequence, tally: Tally) -> None:
        pass

    def update(self, sequence: Sequence, *, wanted: bool) -> None:
        self.updates.append((len(sequence.tokens), wanted))


def engine(lookaheads: tuple[int, int], chunk: int) -> tuple[Engine, Below, Policy]:
    """An engine with one request submitted. The test says what the chain answers."""
    chain, policy = Below(), Policy()
    made = Engine(chain, Scheduler(Room(), max_sequences=2, prefill_chunk=chunk), policy, LIMITS)  # type: ignore[arg-type]
    made.submit(Request(PROMPT, 8, GREEDY, 0, lookaheads))
    return made, chain, policy


def answer(start: int, *tokens: int, missing_from: int | None = None, wanted: bool = False) -> list[Proposal]:
    tallies = (Tally(rounds=1),)
    return [Proposal(1, start, tokens, bytes(len(tokens)), missing_from, wanted, tallies)]


def asked(chain: Below) -> tuple[int, int, tuple[int, ...], bool]:
    """Of the latest work: where its span begins and ends, its lookaheads, and whether a token is wanted."""
    work: Work = chain.asked[-1]
    return work.span.start, work.span.end, work.lookaheads, work.sample


def test_the_last_chunk_gives_the_first_token_and_asks_nobody_below() -> None:
    it, chain, policy = engine((4, 2), chunk=6)
    chain.answers = [answer(6), answer(10, 77)]
    assert it.run_once() == []
    assert asked(chain) == (0, 6, (1,), False)
    [output] = it.run_once()
    assert asked(chain) == (6, 10, (1, 0, 0), True)
    assert output.tokens == (77,)
    assert policy.updates == [], "the token leaves first"
    assert (output.stats.decoded, output.stats.decode_s, output.stats.tallies[0].rounds) == (0, 0.0, 0)
    assert output.stats.prefill_s > 0


def test_then_the_tiers_below_are_told_all_of_it_and_a_snapshot_is_cut() -> None:
    it, chain, policy = engine((4, 2), chunk=64)
    chain.answers = [answer(10, 77), answer(11, 78, 79, wanted=True), answer(13, 80, missing_from=5), answer(14, 81)]
    it.run_once()
    [output] = it.run_once()
    assert policy.updates == [(11, False)]
    assert asked(chain) == (0, 11, (1, 4, 2), True)
    assert chain.asked[-1].span.spec is not None
    assert (output.stats.decoded, output.stats.tallies[0].rounds) == (2, 1)
    it.run_once()
    assert asked(chain) == (11, 13, (1, 4, 2), True), "what they were told they are not told again"
    assert policy.updates[-1] == (13, True)
    it.run_once()
    assert asked(chain) == (5, 14, (1, 4, 2), True), "unless they lack it"


def test_where_nobody_below_is_asked_the_target_hears_only_what_is_new() -> None:
    it, chain, _ = engine((0, 0), chunk=64)
    chain.answers = [answer(10, 77), answer(11, 78), answer(12, 79)]
    for start in (0, 10, 11):
        it.run_once()
        assert asked(chain)[0] == start
    assert it.scheduler.live[1].stated == 0


@pytest.mark.parametrize("prompt", [(5,), (5, 6)])
def test_a_prompt_that_one_pass_takes(prompt: tuple[int, ...]) -> None:
    it, chain, _ = engine((4, 2), chunk=64)
    it.cancel(1)
    chain.answers = [[], [Proposal(2, len(prompt), (9,), b"\2")]]
    it.run_once()
    it.submit(Request(prompt, 1, GREEDY, 0, (4, 2)))
    [output] = it.run_once()
    assert asked(chain) == (0, len(prompt), (1, 0, 0), True)
    assert output.finish_reason == "length"
    assert it.idle
