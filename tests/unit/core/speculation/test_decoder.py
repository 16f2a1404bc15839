"""The loop itself, message by message: what is asked, what is judged, what goes up."""

from __future__ import annotations

import pytest

from tests.by_hand import SPEC, Below, Counting, Tokens, drafted
from triforce_core.messages import Proposal, Span, Tally, Tier, Verdict, Work
from triforce_core.speculation.decoder import SpeculativeDecoder


def work(sequence_id: int = 1, tokens: Tokens = (10, 11), lookaheads: Tokens = (4, 2), *, start: int = 0) -> Work:
    return Work(Span(sequence_id, start, tokens, None if start else SPEC), lookaheads)


@pytest.fixture
def decoder(below: Below, verifier: Counting) -> SpeculativeDecoder:
    return SpeculativeDecoder(below, verifier)


def test_rounds_go_on_until_the_block_is_long_enough(
    decoder: SpeculativeDecoder, below: Below, verifier: Counting
) -> None:
    decoder.submit([work(lookaheads=(4, 2))])
    below.answers = [[drafted(2, (2, 99))], [drafted(4, (4, 5))]]
    assert decoder.collect(1.0) == [], "one token accepted, one of its own: two of four"
    (block,) = decoder.collect(1.0)
    assert block.tokens == (2, 3, 4, 5, 6), "rounds are not cut"
    assert (block.start, block.sequence_id) == (2, 1)
    assert list(block.origins) == [Tier.DRAFT, Tier.RETRIEVAL, Tier.DRAFT, Tier.DRAFT, Tier.RETRIEVAL]
    assert block.tallies[0].counts == Tally(rounds=2, proposed=4, accepted=3, rejected=1, passes=2, drafts=2)
    assert block.tallies[0].busy_s > 0
    assert block.tallies[1] == Tally()
    assert [(w.span.start, w.span.tokens, w.lookaheads) for w in below.asked] == [
        (0, (10, 11), (2,)),
        (2, (2, 3), (2,)),
    ], "each round states what the tier has decided"
    assert below.asked[0].span.spec == SPEC


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_repeated_answer_counts_once(below: Below, verifier: Counting, micro_batches: int) -> None:
    decoder = SpeculativeDecoder(below, verifier, micro_batches=micro_batches)
    decoder.submit([work(1), work(2)])
    below.answers = [[drafted(2, (2, 3)), drafted(2, (2, 3))], [drafted(2, (2, 3)), drafted(2, (), sequence_id=2)]]
    for _ in range(micro_batches):
        decoder.collect(1.0)
    assert [(c.span.sequence_id, c.proposed) for c in verifier.claims] == [(1, (2, 3)), (2, ())]


def test_answers_to_other_positions_are_dropped(decoder: SpeculativeDecoder, below: Below, verifier: Counting) -> None:
    decoder.submit([work()])
    below.answers = [[drafted(1, (7,)), drafted(3, (7,)), drafted(2, (7,), sequence_id=9)], [], [drafted(2, (2,))]]
    decoder.collect(1.0)
    assert [c.proposed for c in verifier.claims] == [(2,)]


def test_what_is_ready_need_not_wait(below: Below, verifier: Counting) -> None:
    decoder = SpeculativeDecoder(below, verifier, micro_batches=2)
    decoder.submit([work(1, lookaheads=(1, 2)), work(2, lookaheads=(1, 2)), work(3, lookaheads=(1, 0))])
    below.answers = [[], [drafted(2, (2,), sequence_id=2)], [drafted(2, (5,))]]
    assert [[p.sequence_id for p in decoder.collect(1.0)] for _ in range(3)] == [[3], [2], [1]]


def test_a_pass_takes_its_share_of_what_is_ready_oldest_first(below: Below, verifier: Counting) -> None:
    """Of four sequences in two micro-batches it judges two, so that the level below has the others; a sequence that
    nobody drafts for takes no share.
    """
    decoder = SpeculativeDecoder(below, verifier, micro_batches=2)
    decoder.submit([work(n, lookaheads=(9, 2)) for n in (1, 2, 3, 4)])
    decoder.submit([work(5, lookaheads=(9, 0))])
    below.answers = [[drafted(2, (2, 3), n) for n in (4, 3, 2)], [drafted(2, (2, 3), 1)]]

    def judged() -> list[int]:
        before = len(verifier.claims)
        decoder.collect(1.0)
        return [c.span.sequence_id for c in verifier.claims[before:]]

    assert judged() == [5, 4, 3]
    assert judged() == [2, 5, 1], "what came first waited longest"


@pytest.mark.parametrize("lookaheads", [(2, 0), (1, 2)])
def test_later_work_replaces_earlier_and_is_all_that_is_waited_for(
    decoder: SpeculativeDecoder, below: Below, lookaheads: Tokens
) -> None:
    """This is so even if the later work skips the level that still owes an answer to the earlier work."""
    decoder.submit([work(lookaheads=(4, 2))])
    decoder.submit([work(tokens=(10, 11, 2), lookaheads=lookaheads)])
    below.answers = [[drafted(2, (7, 7))], [drafted(3, (3,))]] if lookaheads[1] else []
    blocks = decoder.collect(1.0) + ([] if lookaheads[1] else decoder.collect(1.0))
    assert [(b.start, b.tokens) for b in blocks] == [(3, (3, 4))]


def test_earlier_work_that_asked_nobody_leaves_no_answer_behind(decoder: SpeculativeDecoder, below: Below) -> None:
    decoder.submit([work(lookaheads=(4, 0))])
    decoder.submit([work(lookaheads=(1, 2))])
    below.answers = [[drafted(2, (2, 3))]]
    (block,) = decoder.collect(1.0)
    assert block.tokens == (2, 3, 4)


def test_a_released_sequence_is_not_waited_for(decoder: SpeculativeDecoder, below: Below) -> None:
    decoder.submit([work(1), work(2)])
    decoder.release([1, 77])
    decoder.release([1])
    assert below.released == [1, 77, 1]
    below.answers = [[drafted(2, (2, 3)), drafted(2, (2, 3, 4), sequence_id=2)]]
    assert [p.sequence_id for p in decoder.collect(1.0)] == [2]


def test_a_skipped_level_passes_on_what_comes_from_below(
    decoder: SpeculativeDecoder, below: Below, verifier: Counting
) -> None:
    decoder.submit([work(lookaheads=(0, 2))])
    below.answers = [[drafted(2, (8, 9))]]
    (block,) = decoder.collect(1.0)
    assert (block.tokens, block.origins) == ((8, 9), bytes([Tier.DRAFT] * 2))
    assert block.tallies == (Tally(), Tally())
    assert verifier.claims == []


@pytest.mark.parametrize(
    "said",
    [
        Proposal(1, 22, missing_from=5),
        Proposal(1, 22, snapshot_wanted=True),
        Proposal(1, 22, (7,), b"\0", missing_from=0),
    ],
)
def test_a_skipped_level_passes_on_what_is_lacking_below(
    said: Proposal, decoder: SpeculativeDecoder, below: Below
) -> None:
    """Otherwise the level above would never state it again."""
    decoder.submit([work(start=20, lookaheads=(0, 2))])
    below.answers = [[said]]
    (block,) = decoder.collect(1.0)
    assert (block.missing_from, block.snapshot_wanted) == (said.missing_from, said.snapshot_wanted)


def test_a_prefill_chunk_goes_no_further(decoder: SpeculativeDecoder, below: Below, verifier: Counting) -> None:
    verifier.verdict = Verdict()
    decoder.submit([Work(Span(1, 0, (1, 2, 3), SPEC), (1, 8, 3), sample=False)])
    (block,) = decoder.collect(1.0)
    assert (block.start, block.tokens) == (3, ())
    assert below.asked == []
    assert not verifier.claims[0].sample


# Lacks: (from below, the tier's own) → (said above, rounds). The work starts at 20 and ends at 22.
LACKS = {
    "nothing": (None, None, None, 2),
    "the level below, before our work": (5, None, 5, 1),
    "the level below, within our work: the next round states it": (20, None, None, 2),
    "this tier": (None, 7, 7, 1),
    "both: the lower is said": (5, 7, 5, 1),
    "both, the other way round": (8, 7, 7, 1),
}


@pytest.mark.parametrize("name", LACKS)
def test_what_is_missing_goes_up_unless_we_can_state_it(
    name: str, decoder: SpeculativeDecoder, below: Below, verifier: Counting
) -> None:
    from_below, own, said, rounds = LACKS[name]
    verifier.verdict = Verdict(missing_from=own) if own is not None else None
    decoder.submit([work(start=20, lookaheads=(2, 1))])
    below.answers = [[Proposal(1, 22, missing_from=from_below)], [drafted(23, (0,))]]
    blocks = decoder.collect(1.0) or decoder.collect(1.0)
    assert len(below.asked) == rounds
    assert blocks[0].missing_from == said


def test_a_lack_of_the_last_round_goes_up_even_if_it_is_within_our_work(
    decoder: SpeculativeDecoder, below: Below
) -> None:
    """No further round will state it: without this, a lost statement would never be made again."""
    decoder.submit([work(start=20, lookaheads=(1, 1))])
    below.answers = [[Proposal(1, 22, missing_from=20)]]
    assert decoder.collect(1.0)[0].missing_from == 20


@pytest.mark.parametrize("by", ["below", "this tier"])
def test_a_wanted_snapshot_is_asked_for_above(
    by: str, decoder: SpeculativeDecoder, below: Below, verifier: Counting
) -> None:
    decoder.submit([work(lookaheads=(1, 1))])
    below.answers = [[Proposal(1, 2, snapshot_wanted=by == "below")]]
    verifier.verdict = Verdict(snapshot_wanted=True) if by == "this tier" else None
    assert decoder.collect(1.0)[0].snapshot_wanted


@pytest.mark.parametrize("lacks", [Verdict(missing_from=0), Verdict(snapshot_wanted=True), Verdict()])
def test_a_sequence_that_could_not_be_verified_took_part_in_no_pass(
    decoder: SpeculativeDecoder, below: Below, verifier: Counting, lacks: Verdict
) -> None:
    """The controller learns what passes take from these seconds; such a round takes next to none."""
    decoder.submit([work()])
    below.answers = [[drafted(2, (2,))]]
    verifier.verdict = lacks
    (proposal,) = decoder.collect(1.0)
    tally = proposal.tallies[0]
    assert (tally.passes, tally.busy_s, tally.drafts) == (0, 0, 0)


def test_an_ended_sequence_is_handed_up_at_once(decoder: SpeculativeDecoder, below: Below, verifier: Counting) -> None:
    decoder.submit([work(lookaheads=(8, 2))])
    below.answers = [[drafted(2, (2, 3))]]
    verifier.verdict = Verdict((2, 3), num_accepted=2, ended=True)
    (block,) = decoder.collect(1.0)
    assert block.tokens == (2, 3)
    assert block.tallies[0].counts == Tally(rounds=1, proposed=2, accepted=2, rejected=0, passes=1, drafts=1)


def test_a_proposal_that_the_verifier_shortens_is_not_rejected(
    decoder: SpeculativeDecoder, below: Below, verifier: Counting
) -> None:
    """There was room to check one token of three, and the verifier's own token is the next proposed one. If it is
    another, that one is rejected.
    """
    for sequence_id, own, rejected in ((1, 3, 0), (2, 9, 1)):
        decoder.submit([work(sequence_id=sequence_id, lookaheads=(1, 3))])
        below.answers = [[drafted(2, (2, 3, 4), sequence_id)]]
        verifier.verdict = Verdict((2, own), num_accepted=1)
        (block,) = decoder.collect(1.0)
        assert block.tallies[0].counts == Tally(rounds=1, proposed=3, accepted=1, rejected=rejected, passes=1, drafts=1)


def test_each_round_states_below_only_what_is_new(decoder: SpeculativeDecoder, below: Below) -> None:
    """A block's first statement may be a whole prompt. The prompt is sent once, and again from where the level below
    asks for it.
    """
    decoder.submit([work(tokens=(10, 11), lookaheads=(9, 1))])
    for start in (2, 4, 6):
        below.answers.append([drafted(start, (start,))])
        assert decoder.collect(1.0) == []
    below.answers.append([Proposal(1, 8, missing_from=3)])
    assert decoder.collect(1.0) == []
    below.answers.append([Proposal(1, 9, missing_from=0)])
    assert decoder.collect(1.0) == []
    below.answers.append([drafted(10, ())])
    assert len(decoder.collect(1.0)) == 1
    stated = [(w.span.start, w.span.tokens, w.span.spec is not None) for w in below.asked]
    assert stated[:4] == [(0, (10, 11), True), (2, (2, 3), False), (4, (4, 5), False), (6, (6, 7), False)]
    assert stated[4] == (3, (3, 4, 5, 6, 7, 8), False)
    assert stated[5] == (0, (10, 11, 2, 3, 4, 5, 6, 7, 8, 9), True)


def test_the_own_model_is_told_no_whole_prompt_again(
    decoder: SpeculativeDecoder, below: Below, verifier: Counting
) -> None:
    """It is told only the text that the level above has not decided, which is this block."""
    decoder.submit([work(tokens=(10, 11), lookaheads=(5, 1))])
    below.answers = [[drafted(2, (2,))], [drafted(4, (4,))], [drafted(6, (6,))]]
    assert [len(decoder.collect(1.0)) for _ in range(3)] == [0, 0, 1]
    claims = [(c.span.start, c.span.tokens) for c in verifier.claims]
    assert claims == [(0, (10, 11)), (2, (2, 3)), (2, (2, 3, 4, 5))]


class TestEarly:
    """Blocks are handed up early if the level above has nothing to judge. Of two sequences, one or both have a block
    at this level.
    """

    @pytest.fixture
    def decoder(self, below: Below, verifier: Counting) -> SpeculativeDecoder:
        decoder = SpeculativeDecoder(below, verifier, micro_batches=2, hand_up_early=True)
        decoder.submit([work(1, lookaheads=(5, 2)), work(2, lookaheads=(5, 2))])
        return decoder

    def collect(self, decoder: SpeculativeDecoder, below: Below, *answers: Proposal) -> list[tuple[int, Tokens]]:
        below.answers = [[answer] for answer in answers]
        return [(b.sequence_id, b.tokens) for _ in answers for b in decoder.collect(1.0)]

    def test_the_longest_goes_up_half_done_where_nothing_is_there(
        self, decoder: SpeculativeDecoder, below: Below
    ) -> None:
        assert self.collect(decoder, below, drafted(2, ()), drafted(2, (2,), sequence_id=2)) == [], "1 and 2 of 5"
        assert self.collect(decoder, below, drafted(3, (3,))) == []
        assert [(b.sequence_id, b.tokens) for b in decoder.collect(1.0)] == [(1, (2, 3, 4))]
        assert len(below.asked) == 4, "nothing more is asked for it"

    def test_where_one_is_there_already_blocks_grow_to_the_end(self, decoder: SpeculativeDecoder, below: Below) -> None:
        assert self.collect(decoder, below, drafted(2, (2, 3))) == []
        assert [b.sequence_id for b in decoder.collect(1.0)] == [1]
        assert self.collect(decoder, below, drafted(2, (2, 3), sequence_id=2)) == []
        assert self.collect(decoder, below, drafted(5, (5, 6), sequence_id=2)) == [(2, (2, 3, 4, 5, 6, 7))]

    def test_among_several_one_that_is_there_is_enough(self, below: Below, verifier: Counting) -> None:
        decoder = SpeculativeDecoder(below, verifier, micro_batches=1, hand_up_early=True)
        decoder.submit([work(n, lookaheads=(5, 2)) for n in (1, 2, 3)])
        below.answers = [[drafted(2, (2, 3), sequence_id=1), drafted(2, (), 2), drafted(2, (), 3)]]
        assert decoder.collect(1.0) == []
        assert [b.sequence_id for b in decoder.collect(1.0)] == [1], "the longest"
        below.answers = [[drafted(3, (3,), 2), drafted(3, (3,), 3)]]
        assert decoder.collect(1.0) == [], "three tokens each"
        below.answers = [[drafted(5, (), 2), drafted(5, (), 3)]]
        assert decoder.collect(1.0) == [], "the first has not come back"

    def test_sequences_that_nobody_drafts_for_count(self, below: Below, verifier: Counting) -> None:
        decoder = SpeculativeDecoder(below, verifier, micro_batches=2, hand_up_early=True)
        decoder.submit([work(n, lookaheads=(2, 0)) for n in (1, 2)])
        assert decoder.collect(1.0) == [], "one token each"
        assert [b.sequence_id for b in decoder.collect(1.0)] == [1], "half of two"
        assert [(b.sequence_id, len(b.tokens)) for b in decoder.collect(1.0)] == [(2, 2)], "only whole: one is above"

    def test_work_that_comes_during_a_round_is_counted(self, below: Below, verifier: Counting) -> None:
        decoder = SpeculativeDecoder(below, verifier, micro_batches=2, hand_up_early=True)
        decoder.submit([work(1, lookaheads=(5, 2)), work(2, lookaheads=(1, 2))])
        assert self.collect(decoder, below, drafted(2, (), sequence_id=2), drafted(2, (2, 3))) == [(2, (2,))]
        decoder.submit([work(2, (10, 11, 2), lookaheads=(5, 2))])
        assert [(b.sequence_id, b.tokens) for b in decoder.collect(1.0)] == [(1, (2, 3, 4))]

    def test_once_the_other_is_released_nothing_is_early(self, decoder: SpeculativeDecoder, below: Below) -> None:
        decoder.release([2])
        assert self.collect(decoder, below, drafted(2, (2, 3))) == []
        assert self.collect(decoder, below, drafted(5, ())) == []
        assert self.collect(decoder, below, drafted(6, ())) == [(1, (2, 3, 4, 5, 6))]

    def test_levels_that_take_turns_wait(self, below: Below, verifier: Counting) -> None:
        decoder = SpeculativeDecoder(below, verifier)
        decoder.submit([work(1, lookaheads=(5, 2)), work(2, lookaheads=(5, 2))])
        below.answers = [[drafted(2, (2, 3)), drafted(2, (2, 3), sequence_id=2)]]
        assert decoder.collect(1.0) == []
