"""A drafting model proposes the most probable tokens, as far as they are worth a pass, and learns from answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.random_models import random_pair, random_tokens
from tests.stating import geometry
from triforce_core.attention import KERNELS
from triforce_core.kv.heavy_hitter import HeavyHitterKV, HeavyHitterSettings
from triforce_core.kv.streaming import StreamingKV, WindowSettings
from triforce_core.messages import GREEDY, Proposal, SamplingParams, SequenceSpec, Span, Work
from triforce_core.models.chain import RANKS
from triforce_core.models.runner import ModelRunner
from triforce_core.speculation.calibration import FADING, TRUST, Calibration
from triforce_core.speculation.drafting import NODE, ModelProposer

PAIR = random_pair()
TEXT = random_tokens(40, seed=1)
SPEC = SequenceSpec(SamplingParams(), seed=3, prompt_length=40, max_length=200)
WORK = Work(Span(1, 0, TEXT, SPEC), (6,))


class Sure(Calibration):
    """Gives the ranks the same chances everywhere."""

    def __init__(self, *chances: float) -> None:
        super().__init__()
        self.first_right = 1.0
        for rank in range(RANKS):
            chance = chances[rank] if rank < len(chances) else 0.0
            self.drawn[rank] = [chance * seen for seen in self.seen[rank]]


def proposer(calibration: Calibration | None = None) -> ModelProposer:
    kv = StreamingKV(geometry(PAIR), 4, WindowSettings(4, 100, 50), KERNELS["cpu_flash"])
    made = ModelProposer(ModelRunner(PAIR.ours, kv))
    made.calibration = calibration or made.calibration
    return made


def drafted(by: ModelProposer, *work: Work) -> list[Proposal]:
    by.submit([*work])
    return by.collect(0)


def test_a_fixed_length_is_drafted_as_plain_decoding_would() -> None:
    by, text = proposer(), TEXT
    [found] = drafted(by, WORK)
    for token in found.tokens:
        [alone] = drafted(proposer(), replace(WORK, span=Span(1, 0, text, SPEC), lookaheads=(1,)))
        assert alone.tokens == (token,)
        text += (token,)
    assert len(found.tokens) == 6
    assert found.parents == ()
    assert found.tallies[0].passes == 6


@pytest.mark.parametrize(("chance", "least", "passes"), [(0.9, 0.8, 3), (0.9, 0.95, 1), (1.0, 0.9, 6), (0.5, 0.0, 6)])
def test_no_pass_is_run_that_is_worth_less_than_it_costs(chance: float, least: float, passes: int) -> None:
    """The first always is: somebody has asked. Of its tokens the second is reached with the chance of the first, …"""
    [found] = drafted(proposer(Sure(chance)), replace(WORK, least_gain=least or 1e-9))
    assert found.tallies[0].passes == passes
    assert len(found.tokens) == passes
    assert found.tokens == drafted(proposer(), WORK)[0].tokens[:passes]


def test_a_tree_has_the_most_probable_tokens() -> None:
    """With chances of .6 and .3: .6 and .3 at the first level, .36, .18, .18 and .09 at the second."""
    [found] = drafted(proposer(Sure(0.6, 0.3)), replace(WORK, lookaheads=(2,), nodes=10, least_gain=0.95))
    assert found.parents == (-1, -1), "a second level would be worth less than its pass"
    [found] = drafted(proposer(Sure(0.6, 0.3)), replace(WORK, lookaheads=(2,), nodes=10, least_gain=0.1 / NODE))
    assert found.parents == (-1, -1, 0, 0, 1)
    assert found.tokens[0] != found.tokens[1]
    assert found.tallies[0].passes == 2
    [fewer] = drafted(proposer(Sure(0.6, 0.3)), replace(WORK, lookaheads=(9,), nodes=4, least_gain=0.5))
    assert (fewer.tokens, fewer.parents) == (found.tokens[:4], found.parents[:4])
    [sure] = drafted(proposer(Sure(1.0)), replace(WORK, nodes=10, least_gain=0.5))
    assert (sure.parents, len(sure.tokens)) == ((), 6), "a chain is no tree"


def test_a_tree_grows_from_what_its_paths_say() -> None:
    """The tokens of the second level are those that would be drafted if the first were the text."""
    [found] = drafted(proposer(Sure(0.5, 0.4)), replace(WORK, lookaheads=(2,), nodes=6, least_gain=0.01))
    assert found.parents == (-1, -1, 0, 0, 1, 1)
    for node in (0, 1):
        longer = replace(WORK, span=Span(1, 0, (*TEXT, found.tokens[node]), SPEC), lookaheads=(1,))
        [alone] = drafted(proposer(Sure(0.5, 0.4)), replace(longer, nodes=2, least_gain=0.01))
        following = [t for t, parent in zip(found.tokens, found.parents, strict=True) if parent == node]
        assert set(following) == set(alone.tokens)


def test_a_tree_ends_where_the_text_does() -> None:
    work = replace(WORK, nodes=16, least_gain=0.01)
    [found] = drafted(proposer(Sure(0.5, 0.4)), work)
    stopping = replace(SPEC, stop_token_ids=found.tokens[:1])
    [stopped] = drafted(proposer(Sure(0.5, 0.4)), replace(work, span=Span(1, 0, TEXT, stopping)))
    assert 0 not in stopped.parents
    assert 1 in stopped.parents
    ending = replace(SPEC, max_length=len(TEXT) + 3)
    [short] = drafted(proposer(Sure(0.5, 0.4)), replace(work, span=Span(1, 0, TEXT, ending)))
    assert max(short.tree.depths) == 1, "the pass that verifies it adds the last token"


def test_several_sequences_are_drafted_in_the_same_passes() -> None:
    by = proposer(Sure(0.6, 0.3))
    works = [
        replace(WORK, span=Span(1, 0, TEXT, SPEC)),
        replace(WORK, span=Span(2, 0, TEXT[:30], replace(SPEC, seed=9)), nodes=9, least_gain=0.3),
        replace(WORK, span=Span(3, 0, TEXT[5:], replace(SPEC, sampling=GREEDY)), lookaheads=(2,)),
    ]
    alone = [drafted(proposer(Sure(0.6, 0.3)), work)[0] for work in works]
    before = by.runner.passes
    together = drafted(by, *works)
    assert [(p.tokens, p.parents) for p in together] == [(p.tokens, p.parents) for p in alone]
    assert by.runner.passes - before == 6


def test_a_cache_without_trees_drafts_a_chain() -> None:
    sizes = HeavyHitterSettings(budget=60, heavy=30, slack=20, lag=10, most_drafts=20)
    kv = HeavyHitterKV(geometry(PAIR), 2, sizes, KERNELS["cpu_flash"], PAIR.ours.config.num_attention_heads)
    by = ModelProposer(ModelRunner(PAIR.ours, kv))
    by.calibration = Sure(0.5, 0.4)
    [found] = drafted(by, replace(WORK, nodes=9, least_gain=0.01))
    assert (found.parents, len(found.tokens)) == ((), 6)


def test_a_small_window_has_room_for_few_nodes() -> None:
    kv = StreamingKV(geometry(PAIR), 1, WindowSettings(4, 8, 3), KERNELS["cpu_flash"])
    by, text = ModelProposer(ModelRunner(PAIR.ours, kv)), TEXT
    by.calibration = Sure(0.5, 0.4)
    for _ in range(12):
        [found] = drafted(by, replace(WORK, span=Span(1, 0, text, SPEC), nodes=12, least_gain=0.01))
        assert len(found.tokens) == 3
        text += (found.tokens[0],)


def test_a_neighbour_that_chooses_does_not_change_a_fixed_draft() -> None:
    """Even if the calibration says that the second token is the most probable."""
    other = replace(WORK, span=Span(2, 0, TEXT[3:], SPEC), nodes=9, least_gain=0.1)
    [alone] = drafted(proposer(), WORK)
    assert drafted(proposer(Sure(0.1, 0.8)), WORK, other)[0].tokens == alone.tokens


def test_it_learns_what_the_tier_above_draws() -> None:
    """Of each token that was on the way of the text, unless the text before the draft has changed."""
    by = proposer(Sure(0.6, 0.3))
    seen = [row[:] for row in by.calibration.seen]

    def learned() -> float:
        return sum(sum(row) for row in by.calibration.seen) - sum(sum(row) for row in seen)

    [found] = drafted(by, replace(WORK, lookaheads=(2,), nodes=10, least_gain=0.8))
    _, second = found.tokens[:2]
    child = found.tokens[4]
    text = (second, child, 7)
    drafted(by, replace(WORK, span=Span(1, len(TEXT), text), lookaheads=(1,), least_gain=0.5))
    fading = 2 * RANKS * TRUST * (1 - FADING)
    assert learned() == pytest.approx(2 * RANKS, abs=fading), "after the text, and after the second token"
    before = learned()
    changed = Span(1, len(TEXT) + 2, (8, 9))
    drafted(by, replace(WORK, span=changed, lookaheads=(1,), least_gain=0.5))
    assert learned() == before
    by.release([1])
    assert not by.drafted


def test_chances_become_what_was_seen() -> None:
    it, ranked = Calibration(), [(5, 0.0), (6, 0.3), (7, 2.5)]
    prior = it.chances(ranked)
    assert prior[0] > prior[1] > prior[2]
    for count in range(4000):
        it.learn(ranked, 6 if count % 4 else 7)
    assert it.chances(ranked) == pytest.approx([0.0, 0.75, 0.25], abs=0.03)
    far = [(5, 0.0), (6, 5.0)]
    assert it.chances(far) == Calibration().chances(far), "other gaps are as before"
    assert it.chances([(5, 0.0)])[0] > 0.9, "nothing else is allowed"
