"""The heavy-hitter cache against a dense reference: the same tokens kept and the same output, however it was stated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.random_models import Pair, plain_logits, random_pair, random_tokens
from tests.stating import Statement, ask, assert_logits, geometry, spec
from triforce_core.attention import KERNELS, Scoring
from triforce_core.config import MAX_LOOKAHEAD, load_settings
from triforce_core.kv.base import Forward, KVGeometry, Lack
from triforce_core.kv.heavy_hitter import HeavyHeld, HeavyHitterKV, HeavyHitterSettings, attention_sums
from triforce_core.kv.sizes import draft_heavy_hitters
from triforce_core.messages import Drafting, Span
from triforce_core.models.runner import ModelRunner
from triforce_core.plans import plans

LAYERS, HEAD_DIM, SCALE = 2, 8, 0.6
SPLITS = [0, 16, 32]  # heavy hitters of a budget of 32
CHUNKS = [1, 64, 2048]


@dataclass
class Attention:
    """The queries, keys and values of a text, the same whatever the cache does: one attention call per layer."""

    query: Tensor  # [layers, heads, tokens, head_dim]
    keys: Tensor  # [layers, kv_heads, tokens, head_dim]
    values: Tensor

    @classmethod
    def random(cls, tokens: int, heads: int, kv_heads: int) -> Attention:
        generator = torch.Generator().manual_seed(heads)

        def draw(count: int) -> Tensor:
            return torch.randn(LAYERS, count, tokens, HEAD_DIM, generator=generator)

        return cls(draw(heads) * 2, draw(kv_heads), draw(kv_heads))

    @property
    def tokens(self) -> int:
        return self.query.shape[2]


def dense(given: Attention, layer: int, kv_head: int, sizes: HeavyHitterSettings) -> tuple[list[Tensor], list[int]]:
    """H2O written down: for one KV head, the output of each query [group, head_dim], and the tokens that are kept.

    One query at a time, with a set of tokens and the attention that each has had.
    """
    group = given.query.shape[1] // given.keys.shape[1]
    query = given.query[layer, kv_head * group : (kv_head + 1) * group].double()
    keys, values = given.keys[layer, kv_head].double(), given.values[layer, kv_head].double()
    had: dict[int, float] = {}  # by token that is still there
    outputs = []
    for now in range(given.tokens):
        if now and now % sizes.slack == 0 and len(had) > sizes.budget:
            latest = set(range(now - sizes.recent, now))
            others = sorted(set(had) - latest, key=lambda token: -had[token])
            had = {token: had[token] for token in latest | set(others[: sizes.heavy])}
        had[now] = 0.0
        seen = sorted(had)
        shares = (query[:, now] @ keys[seen].mT * SCALE).softmax(-1)
        outputs.append((shares @ values[seen]).float())
        for token, share in zip(seen, shares.sum(0).tolist(), strict=True):
            had[token] += share
    return outputs, sorted(token for token in had if token < given.tokens - 1 - (given.tokens - 1) % sizes.slack)


def cache(heads: int, kv_heads: int, sizes: HeavyHitterSettings, sequences: int = 1) -> HeavyHitterKV:
    shape = KVGeometry(LAYERS, kv_heads, HEAD_DIM, torch.float32, torch.device("cpu"))
    return HeavyHitterKV(shape, sequences, sizes, KERNELS["cpu_flash"], heads)


def passes(kv: HeavyHitterKV, forward: Forward, given: Attention) -> Iterator[tuple[range, Tensor]]:
    """All passes of one statement: the positions, and the output of each layer, [layers, tokens, heads, head_dim]."""
    forwards = [forward]
    while forwards:
        batch = kv.prepare(forwards)
        for row in batch.rows:
            own = slice(row.placed.positions.start, row.placed.positions.stop)
            outputs = [
                kv.attend(
                    layer,
                    given.query[layer, :, own],
                    given.keys[layer, :, own],
                    given.values[layer, :, own],
                    Scoring(SCALE),
                    batch,
                )
                for layer in range(LAYERS)
            ]
            yield row.placed.positions, torch.stack(outputs)
        forwards = batch.rest


def chunked(kv: HeavyHitterKV, given: Attention, chunk: int) -> Tensor:
    """State a text in chunks; returns the outputs, [layers, tokens, heads, head_dim]."""
    outputs = []
    for start in range(0, given.tokens, chunk):
        stop = min(start + chunk, given.tokens)
        text = Span(1, start, tuple(range(start, stop)), None if start else spec(given.tokens))
        outputs += [output for _, output in passes(kv, Forward(text, 0), given)]
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2)], ids=["multi-head", "grouped"])
@pytest.mark.parametrize("heavy", SPLITS, ids="heavy={}of32".format)
def test_it_is_the_dense_reference(heavy: int, heads: int, kv_heads: int, chunk: int) -> None:
    sizes = HeavyHitterSettings(budget=32, heavy=heavy, slack=16)
    given = Attention.random(300, heads, kv_heads)
    kv = cache(heads, kv_heads, sizes)
    outputs, held = chunked(kv, given, chunk), kv.held[1]
    kept = set()
    for layer in range(LAYERS):
        for kv_head in range(kv_heads):
            expected, tokens = dense(given, layer, kv_head, sizes)
            # The reference has evicted at the last position that another token follows; so has the cache.
            assert held.positions[layer, kv_head].tolist() == tokens[: sizes.budget] == tokens
            group = heads // kv_heads
            found = outputs[layer, :, kv_head * group : (kv_head + 1) * group]
            torch.testing.assert_close(found, torch.stack(expected), atol=1e-5, rtol=0)
            kept.add(tuple(tokens))
    assert held.start == 288
    assert len(kept) == (LAYERS * kv_heads if heavy else 1), "heads were meant to keep tokens of their own"


@pytest.mark.parametrize("sizes", [HeavyHitterSettings(40, 20, 16), HeavyHitterSettings(5, 3, 64)], ids=str)
def test_budgets_that_are_no_multiple_of_the_slack(sizes: HeavyHitterSettings) -> None:
    given, kv = Attention.random(200, 2, 1), cache(2, 1, sizes)
    outputs = chunked(kv, given, 2048)
    expected, tokens = dense(given, 1, 0, sizes)
    assert kv.held[1].positions[1, 0].tolist() == tokens
    torch.testing.assert_close(outputs[1], torch.stack(expected), atol=1e-5, rtol=0)


def test_the_attention_of_keys_is_that_of_textbook_attention() -> None:
    query, keys = torch.randn(4, 150, 8), torch.randn(2, 170, 8)  # more queries than are counted together
    scores = query.unflatten(0, (2, 2)) @ keys[:, None].mT * 0.3
    scores = scores.masked_fill(torch.ones(150, 170, dtype=torch.bool).triu(21), -torch.inf)
    expected = scores.softmax(-1).sum((1, 2))
    torch.testing.assert_close(attention_sums(query, keys, 0.3), expected)
    assert float(expected.sum()) == pytest.approx(2 * 2 * 150), "each query gives 1"


def test_memory_is_the_budget_whatever_the_length() -> None:
    sizes = HeavyHitterSettings(budget=32, heavy=16, slack=16)
    kv = cache(4, 2, sizes, sequences=3)
    assert kv.keys[0].shape[1] == 3 * 48 + 1, "and the dump slot"
    assert kv.queries[0].shape[1] == 3 * 16
    tensors = [*kv.keys, *kv.values, *kv.queries]
    dumped = 2 * LAYERS * 2 * HEAD_DIM * 4  # bytes of the dump slot
    assert sum(tensor.nbytes for tensor in tensors) - dumped == 3 * sizes.bytes_each(kv.geometry, 4)
    given, tokens_seen = Attention.random(700, 4, 2), []
    for positions, _ in passes(kv, Forward(Span(1, 0, tuple(range(700)), spec(700)), 0), given):
        held = kv.held[1]
        tokens_seen.append(held.num_kept + positions.stop - held.start)
    assert max(tokens_seen) == 48
    assert kv.used_tokens == 48
    assert sum(tensor.nbytes for tensor in (kv.held[1].positions, kv.held[1].attention)) == 2 * LAYERS * 2 * 32 * 4


# -- with a model ------------------------------------------------------------------------------------------------------

SIZES = HeavyHitterSettings(budget=24, heavy=12, slack=8, lag=3, most_drafts=6)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return random_pair()


def runner_of(pair: Pair, sizes: HeavyHitterSettings = SIZES, sequences: int = 2, most: float = 4096) -> ModelRunner:
    kv = HeavyHitterKV(geometry(pair), sequences, sizes, KERNELS["cpu_flash"], 4, most)
    return ModelRunner(pair.ours, kv)


def state(runner: ModelRunner, sequence_id: int = 1) -> dict[str, Tensor]:
    """All that later passes depend on."""
    kv = runner.kv
    assert isinstance(kv, HeavyHitterKV)
    held = kv.held[sequence_id]
    assert isinstance(held, HeavyHeld)
    [(first, _)] = held.ranges
    own = slice(first, first + held.num_kept + held.cached - held.start)
    queries = kv._queries_of(held, held.start, held.cached)
    return {
        "start": torch.tensor([held.start, held.cached]),
        "positions": held.positions,
        "attention": held.attention,
        "keys": torch.stack([keys[:, own] for keys in kv.keys]),
        "values": torch.stack([values[:, own] for values in kv.values]),
        "queries": torch.stack([query[:, queries] for query in kv.queries]),
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        exact = not tensor.is_floating_point()
        torch.testing.assert_close(
            found[name], tensor, atol=0 if exact else 1e-4, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_while_all_fits_it_is_the_full_cache(pair: Pair) -> None:
    runner, text = runner_of(pair, HeavyHitterSettings(64, 32, 8)), random_tokens(64, seed=1)
    assert_logits(ask(runner, Statement(1, text, 64))[1], plain_logits(pair.theirs, text))


@pytest.mark.parametrize("sampled", [1, 5, 100])
def test_logits_do_not_depend_on_chunks(pair: Pair, sampled: int) -> None:
    """This holds also for logits that several passes of one statement compute, as for the logprobs of a prompt."""
    text, sizes = random_tokens(150, seed=2), HeavyHitterSettings(24, 12, 8)
    stepwise, at_once, in_chunks = (runner_of(pair, sizes) for _ in range(3))
    steps = [ask(stepwise, Statement(1, text[: i + 1], 1, i))[1] for i in range(150)]
    expected = torch.cat([step for step in steps if isinstance(step, Tensor)])
    assert_logits(ask(at_once, Statement(1, text, sampled))[1], expected[-sampled:])
    for start in range(0, 147, 7):
        ask(in_chunks, Statement(1, text[: start + 7], 0, start))
    assert_logits(ask(in_chunks, Statement(1, text, 3, 147))[1], expected[-3:])
    for other in (at_once, in_chunks):
        assert_same(state(other), state(stepwise))


def test_sequences_of_one_batch_do_not_disturb_one_another(pair: Pair) -> None:
    """One takes six passes, the other one; each gets the logits that it gets alone."""
    runner, texts = runner_of(pair), {1: random_tokens(50, seed=3), 2: random_tokens(7, seed=4)}
    answers = ask(runner, *(Statement(i, text, 4) for i, text in texts.items()))
    for sequence_id, text in texts.items():
        alone = runner_of(pair)
        assert_logits(answers[sequence_id], assert_tensor(ask(alone, Statement(1, text, 4))[1]))
        assert_same(state(runner, sequence_id), state(alone))
    runner.release([1])
    assert_logits(ask(runner, Statement(3, texts[1], 4))[3], assert_tensor(answers[1]))


def assert_tensor(found: Tensor | Lack) -> Tensor:
    assert isinstance(found, Tensor)
    return found


def say(runner: ModelRunner, text: tuple[int, ...], start: int, drafted: int = 0) -> Tensor:
    """State a text whose last tokens are drafts; returns the logits of its last token."""
    span = Span(1, start, text[start:], None if start else spec(4096))
    return runner.forward([Forward(span, drafted + 1, drafted)])[0][-1]


STEPS = st.lists(
    st.tuples(
        st.integers(0, SIZES.most_drafts),  # drafts
        st.integers(0, SIZES.most_drafts),  # how many of them are accepted, at most all
        st.integers(1, 30),  # tokens that follow
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40, deadline=None)
@given(steps=STEPS, seed=st.integers(0, 1000))
def test_drafts_leave_no_trace(pair: Pair, steps: list[tuple[int, int, int]], seed: int) -> None:
    """After any history of drafts, the state is that of a text that was stated whole and never drafted."""
    fresh = iter(random_tokens(1000, seed=seed))
    runner, text = runner_of(pair), ()
    for drafts, accepted, more in steps:
        text += tuple(next(fresh) for _ in range(more))
        say(runner, text, len(text) - more)
        proposed = tuple(next(fresh) for _ in range(drafts))
        say(runner, text + proposed, len(text), drafts)
        text += proposed[: min(accepted, drafts)]
    text += (next(fresh),)
    found, never_drafted = say(runner, text, len(text) - 1), runner_of(pair)
    assert_logits(found, say(never_drafted, text, 0))
    assert_same(state(runner), state(never_drafted))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), back=st.lists(st.integers(0, 60), min_size=1, max_size=6))
def test_text_that_is_taken_back_leaves_no_trace(pair: Pair, seed: int, back: list[int]) -> None:
    """The text may reach below what was evicted, or not. At worst all of it is forwarded again."""
    fresh = iter(random_tokens(1000, seed=seed))
    runner, text = runner_of(pair), ()
    for each in back:
        text += tuple(next(fresh) for _ in range(40))
        say(runner, text, max(0, len(text) - 40))
        text = text[: len(text) - each]
    stop = len(text)
    text += tuple(next(fresh) for _ in range(SIZES.lag + 1))  # what was evicted early is due now
    found, stated_once = say(runner, text, stop), runner_of(pair)
    assert_logits(found, say(stated_once, text, 0))
    assert_same(state(runner), state(stated_once))


def test_what_is_open_neither_counts_nor_evicts(pair: Pair) -> None:
    """The eviction at 32 waits until no draft, and none of the last `lag` tokens, can still be taken back."""
    runner, text = runner_of(pair), random_tokens(60, seed=5)
    starts = []
    for end, drafted in ((32, 0), (34, 0), (40, 6), (35, 0), (36, 0)):
        say(runner, text[:end], 0, drafted)
        starts.append(int(state(runner)["start"][0]))
    assert starts == [24, 24, 24, 32, 32]


def test_a_text_beyond_the_models_positions_is_not_forwarded(pair: Pair) -> None:
    runner, text = runner_of(pair, most=40), random_tokens(41, seed=6)
    assert isinstance(ask(runner, Statement(1, text[:40]))[1], Tensor)
    assert ask(runner, Statement(1, text, 1, 40)) == {1: Lack()}


def test_what_was_never_stated_is_missing(pair: Pair) -> None:
    runner, text = runner_of(pair), random_tokens(50, seed=7)
    assert ask(runner, Statement(1, text, 1, start=30)) == {1: Lack(missing_from=0)}
    ask(runner, Statement(1, text[:20]))
    assert ask(runner, Statement(1, text, 1, start=30)) == {1: Lack(missing_from=20)}


def test_a_drafter_has_room_for_the_longest_draft() -> None:
    """A plan without the retrieval tier asks the lowest tier for as many tokens as both lookaheads together."""
    lookaheads = [MAX_LOOKAHEAD, MAX_LOOKAHEAD]
    with_drafts = load_settings(speculation={"lookaheads": lookaheads}, draft={"cache": "heavy_hitter"})
    longest = max(plan.draft for plan in plans((MAX_LOOKAHEAD, MAX_LOOKAHEAD), tuple(Drafting), 16))
    assert draft_heavy_hitters(with_drafts).most_drafts >= longest == 2 * MAX_LOOKAHEAD
