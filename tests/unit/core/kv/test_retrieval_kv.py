"""The retrieval cache: exact over what its snapshot holds, and honest about what it lacks."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.random_models import Pair, plain_logits, random_pair, random_tokens
from tests.stating import Statement, Tokens, ask, assert_logits, fragment, full_kv, full_runner, geometry
from triforce_core.attention import KERNELS
from triforce_core.kv.base import KVCache, Lack
from triforce_core.kv.ranges import sliced
from triforce_core.kv.retrieval import MAX_RELEASED, RetrievalKV
from triforce_core.kv.selectors import MeanKey
from triforce_core.kv.snapshot import ChunkSettings, Snapshot
from triforce_core.models.runner import ModelRunner

BUDGET, TAIL = 64, 24
WHOLE = ChunkSettings(BUDGET, 8, 16)


@pytest.fixture(scope="module", params=[2, 4], ids="kv_heads={}".format)
def pair(request: pytest.FixtureRequest) -> Pair:
    return random_pair(num_key_value_heads=request.param)


def retrieval_runner(pair: Pair, max_sequences: int = 2, tail: int = TAIL) -> tuple[ModelRunner, RetrievalKV]:
    kv = RetrievalKV(geometry(pair), max_sequences, ChunkSettings(BUDGET), tail, KERNELS["cpu_flash"])
    return ModelRunner(pair.ours, kv), kv


def snapshot_of(pair: Pair, text: Tokens, chosen: list[int] | None = None, sequence_id: int = 1) -> Snapshot:
    """The KV of all of `text`, or of the tokens `chosen`, as a full cache holds it."""
    target = full_runner(pair, 500)
    ask(target, Statement(sequence_id, text), max_length=500)
    kv = full_kv(target)
    slots = [s for a, b in sliced(kv.held[sequence_id].ranges, 0, len(text)) for s in range(a, b)]
    kept = [slots[t] for t in (range(len(text)) if chosen is None else chosen)]
    keys, values = (torch.stack([pool[:, kept] for pool in pools]) for pools in (kv.keys, kv.values))
    return Snapshot(sequence_id, 1, len(text), keys, values)


def sparse_logits(pair: Pair, text: Tokens, position: int, chosen: list[int]) -> Tensor:
    """The logits of a plain pass. In it, tokens from `position` on see only the chosen tokens before `position`, and
    one another.
    """
    count = len(text)
    visible = torch.ones(count, count).tril().bool()
    hidden = [t for t in range(position) if t not in chosen]
    visible[position:, hidden] = False
    return plain_logits(pair.theirs, text, torch.zeros(1, 1, count, count).masked_fill(~visible, -torch.inf))


def slots_of(kv: KVCache, tokens: int) -> Tensor:
    """The slots of the first tokens of sequence 1."""
    return torch.tensor([slot for a, b in sliced(kv.held[1].ranges, 0, tokens) for slot in range(a, b)])


@pytest.mark.parametrize("in_pieces", [False, True])
def test_after_changes_the_cache_holds_keys_and_values_of_the_chosen_chunks(pair: Pair, in_pieces: bool) -> None:
    """Of each layer and KV head its own, at the places that the target knows, and the tokens behind whole chunks."""
    text, (runner, kv) = random_tokens(420, seed=2), retrieval_runner(pair)
    target, base, replaced = full_runner(pair, 500), 0, 0
    full = full_kv(target)
    if in_pieces:
        fragment(kv, 7, BUDGET + TAIL)
    for position in range(150, 410, 13):
        ask(target, Statement(1, text[:position]), max_length=500)
        snapshot = full.cut(1, position, WHOLE, MeanKey(), base)
        kv.deliver(snapshot)
        ask(runner, Statement(1, text[: position + 1]), max_length=500)
        base, replaced = snapshot.version, replaced + len(snapshot.changes.places if snapshot.changes else ())
        chunks = full.held[1].layouts[base].chunks
        rest = torch.arange(position // WHOLE.chunk * WHOLE.chunk, position).expand(*chunks.shape[:2], -1)
        tokens = torch.cat([(chunks[..., None] * WHOLE.chunk + torch.arange(WHOLE.chunk)).flatten(2), rest], dim=2)
        mine, theirs = slots_of(kv, snapshot.num_tokens), slots_of(full, position)
        for found, expected in ((kv.keys, full.keys), (kv.values, full.values)):
            for layer, head in product(range(len(found)), range(len(found[0]))):
                assert torch.equal(found[layer][head, mine], expected[layer][head, theirs[tokens[layer, head]]])
    assert replaced > 50


def test_a_snapshot_of_everything_gives_the_targets_logits(pair: Pair) -> None:
    """Cut by the full cache itself, at any position, also in a pool in pieces; then decoding on it."""
    text = random_tokens(BUDGET + TAIL, seed=1)
    target = full_runner(pair, 500)
    for position in (1, 8, 37, 64):
        runner, kv = retrieval_runner(pair)
        if position % 2:
            fragment(kv, 7, BUDGET + TAIL)
        ask(target, Statement(1, text[:position]))
        kv.deliver(full_kv(target).cut(1, position, WHOLE, MeanKey()))
        for end, sampled in [(position + 1, 1), (position + 9, 4), (position + 5, 2), (position + TAIL, 1)]:
            found = ask(runner, Statement(1, text[:end], sampled))[1]
            assert_logits(found, plain_logits(pair.theirs, text[:end])[-sampled:])


def test_a_sparse_snapshot_hides_the_rest_and_nothing_else(pair: Pair) -> None:
    """Tokens after the snapshot see its tokens and one another; growth, rollback and restatement change nothing."""
    rng = random.Random(1)
    text, position = random_tokens(80, seed=2), 80
    chosen = [*range(8), *range(24, 40), *range(70, 80)]
    runner, kv = retrieval_runner(pair)
    ask(runner, Statement(1, text), max_length=500)
    kv.deliver(snapshot_of(pair, text, chosen))
    for _ in range(30):
        kept = max(position, len(text) - rng.choice([0, 0, 1, 5, 20]))
        text = (text[:kept] + random_tokens(rng.randint(1, 9), seed=rng.randrange(10**6)))[: position + TAIL]
        sampled = rng.randint(1, len(text) - position)
        found = ask(runner, Statement(1, text, sampled, start=rng.choice([0, kept])), max_length=500)[1]
        assert_logits(found, sparse_logits(pair, text, position, chosen)[-sampled:])
    hidden = set(range(position)) - set(chosen)
    assert hidden
    assert not torch.allclose(found, plain_logits(pair.theirs, text)[-sampled:], atol=1e-2), "nothing was hidden"  # type: ignore[arg-type]


def test_without_a_snapshot_one_is_wanted(pair: Pair) -> None:
    runner, kv = retrieval_runner(pair)
    text = random_tokens(40, seed=3)
    wanted = Lack(snapshot_wanted=True)
    assert ask(runner, Statement(1, text)) == {1: wanted}
    assert ask(runner, Statement(1, text[:35], 3, start=20)) == {1: wanted}
    kv.deliver(snapshot_of(pair, text[:30]))
    answers = ask(runner, Statement(1, text), Statement(2, text))
    assert_logits(answers[1], plain_logits(pair.theirs, text)[-1:])
    assert answers[2] == wanted, "another sequence's snapshot is no use"


def test_a_full_tail_wants_a_snapshot_and_one_mends_it(pair: Pair) -> None:
    runner, kv = retrieval_runner(pair)
    text = random_tokens(BUDGET, seed=4)
    kv.deliver(snapshot_of(pair, text[:20]))
    assert_logits(ask(runner, Statement(1, text[: 20 + TAIL]))[1], plain_logits(pair.theirs, text[: 20 + TAIL])[-1:])
    assert ask(runner, Statement(1, text[: 21 + TAIL])) == {1: Lack(snapshot_wanted=True)}
    back = text[: 15 + TAIL]  # rolled back, it fits again
    assert_logits(ask(runner, Statement(1, back))[1], plain_logits(pair.theirs, back)[-1:])
    kv.deliver(replace(snapshot_of(pair, text[:60]), version=2))
    assert_logits(ask(runner, Statement(1, text))[1], plain_logits(pair.theirs, text)[-1:])


def test_a_lack_does_not_pretend_to_hold_what_was_stated(pair: Pair) -> None:
    """A text that did not fit was never forwarded. When it is cut short, its tokens are not taken for those of the text
    before.
    """
    runner, kv = retrieval_runner(pair)
    text, other = random_tokens(60, seed=10), random_tokens(60, seed=11)
    kv.deliver(snapshot_of(pair, text[:20]))
    ask(runner, Statement(1, text[:40]))
    turned = text[:30] + other[30:]
    assert ask(runner, Statement(1, turned)) == {1: Lack(snapshot_wanted=True)}
    for end in (35, 40):
        assert_logits(ask(runner, Statement(1, turned[:end]))[1], plain_logits(pair.theirs, turned[:end])[-1:])


def test_the_old_version_serves_until_the_new_one_is_there_and_never_returns(pair: Pair) -> None:
    """Versions are told apart by what they hide; what is in the tail is forwarded again under a new one."""
    text = random_tokens(60, seed=5)
    first = snapshot_of(pair, text[:40], list(range(0, 40, 2)))
    second = replace(snapshot_of(pair, text[:50], list(range(1, 50, 2))), version=2)
    runner, kv = retrieval_runner(pair)

    def assert_seen(end: int, position: int, chosen: range) -> None:
        found = ask(runner, Statement(1, text[:end], 2))[1]
        assert_logits(found, sparse_logits(pair, text[:end], position, list(chosen))[-2:])

    kv.deliver(first)
    assert_seen(45, 40, range(0, 40, 2))
    assert_seen(56, 40, range(0, 40, 2))
    kv.deliver(second)
    kv.deliver(first)  # late
    assert_seen(57, 50, range(1, 50, 2))
    kv.deliver(first)  # later still
    assert_seen(58, 50, range(1, 50, 2))
    kv.deliver(second)  # a repetition
    assert_seen(60, 50, range(1, 50, 2))
    assert_seen(54, 50, range(1, 50, 2))


def test_of_several_deliveries_the_newest_counts(pair: Pair) -> None:
    text = random_tokens(60, seed=6)
    deliveries = [replace(snapshot_of(pair, text[: 10 * v], list(range(v, 10 * v))), version=v) for v in (2, 4, 3, 1)]
    runner, kv = retrieval_runner(pair)
    for snapshot in deliveries:
        kv.deliver(snapshot)
    assert_logits(ask(runner, Statement(1, text))[1], sparse_logits(pair, text, 40, list(range(4, 40)))[-1:])


def test_a_late_statement_gets_no_answer_and_does_no_harm(pair: Pair) -> None:
    """The snapshot is ahead of what is stated: nothing can be said, nothing is wanted, and the next statement works."""
    text = random_tokens(60, seed=7)
    runner, kv = retrieval_runner(pair)
    kv.deliver(snapshot_of(pair, text[:20]))
    ask(runner, Statement(1, text[:30]))
    kv.deliver(replace(snapshot_of(pair, text[:50]), version=2))
    assert ask(runner, Statement(1, text[:40], 1, start=30)) == {1: Lack()}
    assert ask(runner, Statement(1, text[:52], 4, start=30)) == {1: Lack()}, "rows below the snapshot are wanted"
    assert_logits(ask(runner, Statement(1, text[:55], 4, start=30))[1], plain_logits(pair.theirs, text[:55])[-4:])


def test_a_release_forgets_the_snapshot_too(pair: Pair) -> None:
    runner, kv = retrieval_runner(pair)
    text = random_tokens(30, seed=8)
    kv.deliver(snapshot_of(pair, text[:20]))
    ask(runner, Statement(1, text))
    kv.deliver(replace(snapshot_of(pair, text[:25]), version=2))
    runner.release([1, 1])
    assert ask(runner, Statement(1, text)) == {1: Lack(snapshot_wanted=True)}
    assert not kv.arrived


def test_a_snapshot_that_comes_after_the_release_is_refused(pair: Pair) -> None:
    """It was on its way when its sequence ended. Where only a link had ended, the sequence is stated again."""
    runner, kv = retrieval_runner(pair)
    text = random_tokens(30, seed=8)
    snapshots = [replace(snapshot_of(pair, text[:20]), version=version) for version in (1, 2, 3)]
    ask(runner, Statement(1, text))
    kv.deliver(snapshots[0])
    runner.release([1, 2])
    assert not kv.take(snapshots[1])
    assert not kv.take(replace(snapshots[1], sequence_id=2)), "one that was never stated here"
    assert not kv.arrived
    assert [kv.is_live(i) for i in (1, 2, 3)] == [False, False, True]
    assert ask(runner, Statement(1, text)) == {1: Lack(snapshot_wanted=True)}
    assert kv.take(snapshots[2])
    assert_logits(ask(runner, Statement(1, text))[1], plain_logits(pair.theirs, text)[-1:])


def test_what_is_over_is_not_remembered_for_ever(pair: Pair) -> None:
    _, kv = retrieval_runner(pair)
    for sequence_id in range(3 * MAX_RELEASED):
        kv.release(sequence_id)
    assert len(kv.released) == MAX_RELEASED
    assert not kv.is_live(3 * MAX_RELEASED - 1), "the latest, of which something may still be on its way"


def test_snapshots_that_nobody_installs_do_not_pile_up(pair: Pair) -> None:
    """They may arrive after their sequence was released. The latest snapshots stay, because their sequences may still
    be stated.
    """
    text = random_tokens(30, seed=9)
    snapshot = snapshot_of(pair, text[:20])
    runner, kv = retrieval_runner(pair, max_sequences=2)
    for sequence_id in range(1, 50):
        kv.deliver(replace(snapshot, sequence_id=sequence_id))
    assert len(kv.arrived) <= 2
    answers = ask(runner, Statement(48, text), Statement(49, text))
    for sequence_id in (48, 49):
        assert_logits(answers[sequence_id], plain_logits(pair.theirs, text)[-1:])
    assert not kv.arrived


def test_deliveries_from_another_thread_take_effect_whole(pair: Pair) -> None:
    """While passes run, every pass sees one version or another, never a mixture."""
    text = random_tokens(60, seed=9)
    snapshots = [
        replace(snapshot_of(pair, text[:p], list(range(p % 7, p))), version=v) for v, p in enumerate(range(10, 50), 1)
    ]
    runner, kv = retrieval_runner(pair, tail=60)
    kv.deliver(snapshots[0])
    thread = threading.Thread(target=lambda: [kv.deliver(s) for s in snapshots])
    thread.start()
    seen = set()
    while thread.is_alive() or len(snapshots) not in seen:
        found = ask(runner, Statement(1, text))[1]
        version = kv.held[1].version  # type: ignore[attr-defined]
        position = snapshots[version - 1].position
        assert_logits(found, sparse_logits(pair, text, position, list(range(position % 7, position)))[-1:])
        seen.add(version)
    thread.join()
    assert max(seen) == len(snapshots)
