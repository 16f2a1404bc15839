"""The full cache shares the KV of texts that begin alike: whatever is opened, stated, grown, released and dropped, each
sequence sees the KV of its own text, no slot is lost, and every rank does the same.

KV stands here for the text up to its token, so that a wrong slot shows.
"""

from __future__ import annotations

import pickle
import random
from collections import Counter, deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.integrity import check, slots_of
from triforce_core.attention import KERNELS
from triforce_core.engine import scheduler
from triforce_core.engine.scheduler import Scheduler
from triforce_core.engine.sequence import Request, Sequence
from triforce_core.kv import prefix_tree
from triforce_core.kv.base import Batch, Forward, KVGeometry
from triforce_core.kv.full import FullKV
from triforce_core.kv.prefix_tree import Cursor
from triforce_core.kv.ranges import size_of, sliced
from triforce_core.kv.text_slots import MOST_RANGES
from triforce_core.messages import GREEDY, SequenceSpec, Span, agreement
from triforce_core.models.replay import CallExecutor, LeadingFullKV

GEOMETRY = KVGeometry(1, 1, 1, torch.float64, torch.device("cpu"))


def shared_kv(pool_tokens: int, unit: int) -> FullKV:
    return FullKV(GEOMETRY, pool_tokens, KERNELS["reference"], unit=unit, shares=True)


def spec(max_length: int, selector: str = "mean_key", **fields: object) -> SequenceSpec:
    return SequenceSpec(GREEDY, seed=0, prompt_length=1, max_length=max_length, selector=selector, **fields)  # type: ignore[arg-type]


def kv_of(text: list[int]) -> float:
    return float(hash(tuple(text)) % 2**50)


def statement(sequence_id: int, start: int, text: list[int], drafted: int = 0) -> Forward:
    return Forward(Span(sequence_id, start, tuple(text[start:])), 0, drafted)


def write(kv: FullKV, text: list[int], batch: Batch) -> list[int]:
    """Do what a pass does, and return the positions that were forwarded."""
    for row in batch.rows:
        for position, slot in zip(row.placed.positions, slots_of(row.placed.writes), strict=True):
            kv.keys[0][0, slot] = kv_of(text[: position + 1])
    return [position for row in batch.rows for position in row.placed.positions]


def state(kv: FullKV, sequence_id: int, text: list[int]) -> list[int]:
    """State a text as far as it goes, and return the positions that were forwarded."""
    return write(kv, text, kv.prepare([statement(sequence_id, len(kv.held[sequence_id].tokens), text)]))


def assert_sees_its_own(kv: FullKV, sequence_id: int) -> None:
    held = kv.held[sequence_id]
    slots = slots_of(sliced(held.ranges, 0, held.cached))
    expected = [kv_of(held.tokens[: n + 1]) for n in range(held.cached)]
    assert kv.keys[0][0, slots, 0].tolist() == expected, f"sequence {sequence_id}"


def read(kv: FullKV, sequence_id: int, text: list[int], room: int = 8, **fields: object) -> int:
    """Open a text, state it all, and return how much of it was there."""
    held = kv.open(sequence_id, spec(len(text) + 200, **fields), len(text) + room, text)
    assert held is not None
    matched = held.cached
    assert state(kv, sequence_id, text) == [*range(matched, len(text))]
    assert_sees_its_own(kv, sequence_id)
    check(kv)
    return matched


def random_text(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100) for _ in range(count)]


class Wire:
    """A wire to a follower that reads later."""

    world, rank = 2, 1

    def __init__(self) -> None:
        self.commands: deque[bytes] = deque()

    def broadcast(self, command: object) -> None:
        self.commands.append(pickle.dumps(command))

    def expect(self, num_tokens: int) -> None:
        """No watch is needed: nobody hangs here."""


class Passes:
    """A follower's passes. They do only what the host does in a pass."""

    def __init__(self, kv: FullKV) -> None:
        self.kv = kv

    def forward(self, forwards: list[Forward]) -> None:
        self.kv.prepare(forwards)


def host_side(kv: FullKV) -> object:
    held = {i: (h.tokens, h.cached, h.ranges, h.given, h.own_ranges) for i, h in kv.held.items()}
    nodes = sorted((n.start, n.tokens, n.slots, n.users, n.used, n.serial) for n in kv.tree.nodes())
    return held, nodes, kv.allocator.free_ranges, kv.allocator.wishes


class History:
    """Documents with few beginnings, read in chunks by several sequences at once, decoded with drafts that are taken
    back, cancelled anywhere, in a pool that is too small for them; and a follower that does the same later.
    """

    def __init__(self, seed: int, unit: int, pool: int) -> None:
        self.rng, self.pool, self.wire = random.Random(seed), pool, Wire()
        self.kv, self.theirs = shared_kv(pool, unit), shared_kv(pool, unit)
        self.leading = LeadingFullKV(self.kv, self.wire, gathered=False)  # type: ignore[arg-type]
        self.executor = CallExecutor(self.wire, self.theirs, None)  # type: ignore[arg-type]
        self.executor.runners[self.leading.tier] = Passes(self.theirs)  # type: ignore[assignment]
        self.documents = [self.text(150, kinds=3) for _ in range(3)]
        self.waiting: list[tuple[list[int], SequenceSpec, Cursor | None]] = []
        self.texts: dict[int, list[int]] = {}  # of live sequences
        self.ended: list[list[int]] = []
        self.opened = 0
        self.events: Counter[str] = Counter()

    def text(self, most: int, kinds: int = 10**6) -> list[int]:
        return random_text(self.rng.randint(1, most), self.rng.randrange(kinds))

    def step(self) -> None:
        action = self.rng.random()
        if action < 0.3:
            self.arrive()
        elif action < 0.5 and self.waiting:
            self.open()
        elif action < 0.8 and self.texts:
            self.go_on(self.rng.choice([*self.texts]))
        elif self.texts:
            self.end(self.rng.choice([*self.texts]))
        check(self.kv)
        for i in self.texts:
            assert_sees_its_own(self.kv, i)
        assert self.kv.used_tokens + self.kv.kept_tokens + self.kv.allocator.num_free == self.kv.allocator.num_slots

    def arrive(self) -> None:
        old = self.rng.choice(self.ended if self.ended and self.rng.random() < 0.5 else self.documents)
        text = [*old, *self.text(30)][: self.pool - 60]
        own = spec(len(text) + self.rng.randint(1, 60), self.rng.choice(["mean_key", "snapkv", "h2o"]))
        self.waiting.append((text, own, self.leading.look(own, text)))

    def open(self) -> None:
        text, own, cursor = self.waiting.pop(self.rng.randrange(len(self.waiting)))
        tokens = self.rng.randint(len(text), own.max_length)
        possible, again = self.leading.can_open(own, tokens, cursor), self.leading.look(own, text)
        if cursor is not None and again is not None:
            assert self.leading.matched(cursor) == self.leading.matched(again), "a cursor that waited sees the same"
        self.opened += 1
        held = self.leading.open(self.opened, own, tokens, text)
        assert (held is not None) == possible
        assert held is not None or self.texts, "in a pool that nobody uses, all is to be had"
        if held is not None:
            self.texts[self.opened] = text
            self.events["hit"] += held.cached > 0
            self.events["copied"] += size_of(self.kv.held[self.opened].given) < held.cached

    def go_on(self, i: int) -> None:
        held, text = self.kv.held[i], self.texts[i]
        if len(held.tokens) < len(text):  # a chunk of its prompt
            told, drafted = text[: len(held.tokens) + self.rng.randint(1, 60)], 0
        else:
            told = [*text, *self.text(12)][: held.spec.max_length]
            drafted = self.rng.randint(0, len(told) - len(text))
        if not self.leading.grow(i, len(told)):
            self.events["full"] += 1
            return
        self.texts[i] = text if len(told) <= len(text) else told[: len(told) - drafted]
        write(self.kv, told, self.leading.prepare([statement(i, min(len(held.tokens), len(text)), told, drafted)]))

    def end(self, i: int) -> None:
        self.ended.append(self.kv.held[i].tokens.copy())
        self.leading.release(i)
        del self.texts[i]

    def close(self) -> None:
        while self.wire.commands:
            self.executor.execute(pickle.loads(self.wire.commands.popleft()))
        assert host_side(self.theirs) == host_side(self.kv)
        for i in [*self.texts]:
            self.end(i)
        check(self.kv)
        assert self.kv.used_tokens == 0
        self.events["dropped"] += self.kv.dropped_tokens
        self.kv.tree.drop_until(lambda: False)
        assert self.kv.allocator.free_ranges == [(0, self.kv.allocator.num_slots)]
        assert not self.kv.allocator.wishes


def test_any_history() -> None:
    events: Counter[str] = Counter()

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(st.integers(0, 10**6), st.sampled_from([1, 4, 8]), st.sampled_from([200, 400, 1200]))
    def run(seed: int, unit: int, pool: int) -> None:
        history = History(seed, unit, pool)
        for _ in range(60):
            history.step()
        history.close()
        events.update(history.events)

    run()
    for event in ("hit", "copied", "full", "dropped"):
        assert events[event] > 2, event


def test_a_text_is_found_again_up_to_its_last_queries() -> None:
    kv, text = shared_kv(6000, 8), random_text(400, 1)
    assert read(kv, 1, text) == 0
    kv.release(1)
    assert (kv.used_tokens, kv.kept_tokens) == (0, 400)
    assert read(kv, 2, text) == 392, "one query chooses the chunks"
    assert read(kv, 3, text, selector="snapkv") == 384, "eight do"
    assert read(kv, 4, text, selector="h2o") == 0, "all do"
    assert read(kv, 5, text, prompt_logprobs=0) == 0, "all logits are wanted"
    assert read(kv, 6, text, cache_salt="mine") == 0
    assert read(kv, 7, text, cache_salt="mine") == 392, "while the first is still live"
    other = [*text[:99], text[99] + 1, *text[100:]]
    assert read(kv, 8, other) == 96
    assert read(kv, 9, text[:8]) == 0
    assert read(kv, 10, [*text, *text]) == 400, "a longer text finds it whole"


def test_a_document_is_shared_while_it_is_read() -> None:
    kv, text = shared_kv(4000, 8), random_text(1000, 2)
    kv.open(1, spec(1100), 1000, text)
    cursor = kv.look(spec(1100), text)
    assert cursor is not None
    for stop, found in ((100, 96), (500, 496), (1000, 992)):
        state(kv, 1, text[:stop])
        assert kv.matched(cursor) == found
        check(kv)
    assert size_of(kv.held[1].own_ranges) == 8, "all but the last token is the tree's"
    for reader in range(2, 10):
        assert read(kv, reader, text) == 992
    assert kv.used_tokens == 1000 + 8 * 16


@pytest.mark.parametrize("header", [8, 63, 64])
def test_a_second_live_document_with_the_same_header_is_shared_too(header: int) -> None:
    """Both were opened before either was read: the tree has the header from the first one only."""
    kv, top = shared_kv(4000, 8), random_text(header, 3)
    texts = [top + random_text(500, seed) for seed in (4, 5)]
    for i, text in enumerate(texts):
        assert kv.open(i, spec(700), 600, text) is not None
    for i, text in enumerate(texts):
        state(kv, i, text)
        check(kv)
    for i, text in enumerate(texts):
        assert read(kv, 10 + i, text) == (header + 500 - 2) // 8 * 8


def test_a_chat_of_many_turns_keeps_hitting() -> None:
    """Each turn leaves a piece at slots of its own; a sequence has few ranges."""
    kv, text = shared_kv(40_000, 8), random_text(200, 6)
    for turn in range(1, 16):
        kv.open(100 + turn, spec(8), 8)  # what is behind the last turn's range
        matched = read(kv, turn, text)
        assert matched >= len(text) - 70 - 9 or turn == 1
        assert len(kv.held[turn].ranges) < MOST_RANGES, "it has some left to grow into"
        kv.release(turn)
        kv.release(100 + turn)
        text = [*text, *random_text(70, 100 + turn)]


def test_what_was_used_least_recently_is_dropped_first() -> None:
    kv = shared_kv(1000, 8)
    texts = [random_text(240, seed) for seed in range(4)]
    for i, text in enumerate(texts):
        read(kv, i, text)
        kv.release(i)
    assert read(kv, 10, texts[0]) == 232
    kv.release(10)
    assert read(kv, 11, random_text(240, 9), room=0) == 0, "240 slots are needed, 40 are free"
    assert kv.dropped_tokens == 240
    kv.release(11)
    for i in (0, 2, 3):
        assert read(kv, 20 + i, texts[i][:-1]) > 0
        kv.release(20 + i)
    assert kv.look(spec(300), texts[1]) is not None
    assert kv.matched(kv.look(spec(300), texts[1])) == 0  # type: ignore[arg-type]


def test_kept_texts_are_dropped_before_the_pool_is_broken_up() -> None:
    kv = shared_kv(1000, 8)
    for i in range(4):
        read(kv, i, random_text(240, i), room=0)
    kv.release(0)
    kv.release(2)  # 240 + 240 + 40 slots are free or idle, in three places
    assert kv.can_open(spec(300), 240)
    assert not kv.can_open(spec(700), 560)
    held = kv.open(9, spec(240), 200)
    assert held is not None
    assert len(held.ranges) == 1
    assert kv.dropped_tokens == 240, "one of them, and not both"
    check(kv)


def test_texts_are_not_dropped_for_one_range_where_two_do() -> None:
    """There are two places of 160 free slots, with kept texts between them."""
    kv = shared_kv(960, 8)
    for i in range(6):
        read(kv, i, random_text(160, i), room=0, cache_salt="" if i in (1, 2, 4, 5) else "gone")
    for i in range(6):
        kv.release(i)
    for node in [node for node in kv.tree.nodes() if node.parent is kv.tree.root.children["gone"]]:
        kv.tree.drop(node)
    assert kv.allocator.num_free == 320
    held = kv.open(9, spec(2000), 320)
    assert held is not None
    assert (len(held.ranges), kv.dropped_tokens) == (2, 320), "only what this test has dropped itself"
    assert not kv.hemmed_in(9)
    check(kv)
    kv.release(9)
    kept = kv.kept_tokens
    assert len(kv.slots.allocate(320, 2, 100)) == 1, "with two that are shared, and one that it will grow into"
    assert kv.kept_tokens < kept


def test_a_sequence_grows_in_place_into_what_nobody_uses() -> None:
    kv = shared_kv(296, 8)
    for i in range(3):
        kv.open(i, spec(100 if i else 1000), 96, random_text(90, i))
        state(kv, i, random_text(90, i))
    assert kv.allocator.num_free == 8
    assert not kv.grow(0, 150)
    kv.release(2)
    assert kv.kept_tokens == 88
    assert kv.grow(0, 150)
    assert len(kv.held[0].ranges) == 1
    assert kv.dropped_tokens == 88
    check(kv)


def test_what_is_in_use_is_not_dropped() -> None:
    kv, text = shared_kv(1000, 8), random_text(400, 1)
    read(kv, 1, text)
    assert read(kv, 2, text) == 392
    kv.release(1)
    assert not kv.can_open(spec(800), 700)
    assert kv.open(3, spec(800), 700) is None
    assert_sees_its_own(kv, 2)
    kv.release(2)
    assert kv.can_open(spec(800), 700)


@given(st.lists(st.integers(0, 1), max_size=300), st.integers(0, 300), st.integers(0, 5))
def test_agreement_is_the_first_difference(one: list[int], at: int, first: int) -> None:
    other = [*range(first), *one]
    if at < len(one):
        other[first + at] ^= 1
    assert agreement(other, first, one, 0, len(one)) == min(at, len(one))


def test_questions_that_wait_for_a_document_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not compared in every turn. Sixty-four questions wait while the document is read, and then go live
    together.
    """
    compared = 0

    def counted(one: list[int], first: int, other: list[int], second: int, most: int) -> int:
        nonlocal compared
        found = agreement(one, first, other, second, most)
        compared += found
        return found

    monkeypatch.setattr(prefix_tree, "agreement", counted)
    monkeypatch.setattr(scheduler, "agreement", counted)
    document, questions = random_text(5000, 1), 64
    kv = shared_kv(50_000, 8)
    waiting = Scheduler(kv, max_sequences=questions, prefill_chunk=128)
    for n in range(questions):
        text = [*document, *random_text(20, n)]
        request = Request(tuple(text), 8, GREEDY, 0, (0, 0))
        waiting.add(Sequence(n + 1, request, spec(len(text) + 8), text))
    turns = 0
    while waiting.live.keys() <= {1}:
        waiting.admit()
        for work in waiting.next_work():
            live = waiting.live[work.span.sequence_id]
            kv.prepare([Forward(work.span, int(work.sample))])
            live.work, live.prefilled = None, work.span.end
        turns += 1
    assert len(waiting.live) == questions
    assert turns == 40, "the few tokens that the last chunk would save are not worth another turn"
    assert compared < 4 * questions * len(document)
    check(kv)


def test_nothing_is_shared_where_that_is_not_wanted() -> None:
    kv = FullKV(GEOMETRY, 1000, KERNELS["reference"], unit=8)
    text = random_text(100, 1)
    assert read(kv, 1, text) == read(kv, 2, text) == 0
    kv.release(1)
    kv.release(2)
    assert kv.allocator.free_ranges == [(0, 1000)]
