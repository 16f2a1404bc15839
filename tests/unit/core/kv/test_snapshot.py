"""How a snapshot's budget is divided, and which chunks it holds: against a brute-force choice over recorded keys."""

from __future__ import annotations

import random
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.random_models import Pair, plain_logits, random_pair, random_tokens
from tests.recording import Recorded, recorded
from tests.stating import Statement, ask, fragment, full_kv, full_runner
from triforce_core.config import RetrievalSettings
from triforce_core.kv.selectors import SELECTORS, MeanKey
from triforce_core.kv.snapshot import ChunkSettings, Snapshot

Tokens = tuple[int, ...]

chunk_settings = st.integers(1, 40).flatmap(
    lambda chunk: st.builds(
        ChunkSettings,
        budget=st.integers(2, 30).map(lambda n: n * chunk),
        chunk=st.just(chunk),
        recent=st.integers(0, 300),
    )
)


@given(chunk_settings, st.integers(1, 2000))
def test_how_the_budget_is_divided(chunks: ChunkSettings, position: int) -> None:
    local_start, num_chosen = chunks.split(position)
    local, complete = position - local_start, local_start // chunks.chunk
    assert local_start % chunks.chunk == 0, "chunks are complete"
    assert 0 <= num_chosen <= complete
    assert local + num_chosen * chunks.chunk <= chunks.budget, "the budget is never exceeded"
    if local_start:
        assert num_chosen >= 1, "the first chunk has room"
        recent = min(chunks.recent, chunks.budget - 2 * chunks.chunk) // chunks.chunk * chunks.chunk
        assert local >= recent, "what is recent is kept"
        unused = chunks.budget - local - num_chosen * chunks.chunk
        assert unused < chunks.chunk or num_chosen == complete, "the budget is used"
    if position <= chunks.budget:
        assert num_chosen == complete, "what fits is held whole"


@pytest.mark.parametrize(("budget", "chunk"), [(1024, 8), (96, 32), (48, 8)])
def test_half_of_a_budget_is_recent(budget: int, chunk: int) -> None:
    local_start, num_chosen = ChunkSettings.halved(budget, chunk).split(10_000 * chunk)
    local = 10_000 * chunk - local_start
    assert budget // 2 - chunk < local <= budget // 2
    assert num_chosen * chunk == budget - local


@pytest.fixture(scope="module", params=[(4, 4), (4, 2), (8, 2), (4, 1)], ids="heads={0[0]}/{0[1]}".format)
def pair(request: pytest.FixtureRequest) -> Pair:
    heads, kv_heads = request.param
    pair = random_pair(num_attention_heads=heads, num_key_value_heads=kv_heads, seed=heads + kv_heads)
    pair.theirs.set_attn_implementation("recording")
    return pair


def brute_force(record: Recorded, layer: int, head: int, position: int, chunks: ChunkSettings) -> list[int]:
    """The tokens that a KV head's snapshot must hold: the first chunk, the best others, and the local window."""
    local_start, num_chosen = chunks.split(position)
    keys = record.keys[layer]
    group = len(record.queries[layer]) // len(keys)
    means = torch.stack(
        [keys[head, i : i + chunks.chunk].mean(0) for i in range(0, local_start, chunks.chunk)] or [keys[head, 0]]
    )
    wanted = torch.zeros(len(means))
    for query in record.queries[layer][head * group : (head + 1) * group, position - 1]:
        wanted += (means @ query / keys.shape[-1] ** 0.5).softmax(-1)  # each query head has one vote
    wanted[0] = torch.inf
    best = sorted(wanted.argsort(descending=True)[:num_chosen].tolist())
    return [t for i in best for t in range(i * chunks.chunk, (i + 1) * chunks.chunk)] + [*range(local_start, position)]


def assert_is_cut(snapshot: Snapshot, record: Recorded, chunks: ChunkSettings) -> None:
    """The snapshot holds, in order and by layer and KV head, the keys and values of the brute-force choice."""
    assert snapshot.keys.shape[:2] == (len(record.keys), len(record.keys[0])), "one selection a KV head"
    for layer, (keys, values) in enumerate(zip(snapshot.keys, snapshot.values, strict=True)):
        for head in range(len(keys)):
            tokens = brute_force(record, layer, head, snapshot.position, chunks)
            torch.testing.assert_close(keys[head], record.keys[layer][head, tokens], atol=1e-4, rtol=0)
            torch.testing.assert_close(values[head], record.values[layer][head, tokens], atol=1e-4, rtol=0)


CHUNKS = [ChunkSettings(32, 4, 8), ChunkSettings(64, 32, 64), ChunkSettings(24, 1, 3), ChunkSettings(48, 16, 0)]


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_cut_holds_the_chunks_that_the_last_query_wants_most(
    pair: Pair, chunks: ChunkSettings, in_pieces: bool
) -> None:
    """At several positions of a growing text, the landmarks of each cut serving the next."""
    runner, text = full_runner(pair, 600), random_tokens(150, seed=chunks.chunk)
    if in_pieces:
        fragment(runner.kv, 43, 150)
    record = recorded(pair, text)
    versions = []
    for position in (1, chunks.chunk, chunks.budget, chunks.budget + 1, 97, 128, 150):
        ask(runner, Statement(1, text[:position], 1), max_length=150)
        snapshot = full_kv(runner).cut(1, position, chunks, MeanKey())
        assert snapshot.position == position
        assert snapshot.keys.shape[2] <= chunks.budget
        versions.append(snapshot.version)
        assert_is_cut(snapshot, record, chunks)
    assert versions == sorted(set(versions)), "later cuts have higher versions"


def test_a_choice_is_not_all_the_same() -> None:
    """The brute force would prove little if every layer and head chose alike, or chose the latest."""
    pair = random_pair(seed=6)
    pair.theirs.set_attn_implementation("recording")
    record = recorded(pair, random_tokens(150, seed=1))
    choices = {tuple(brute_force(record, layer, head, 150, CHUNKS[0])) for layer in (0, 1) for head in (0, 1)}
    assert len(choices) == 4


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_the_query_is_the_last_before_the_cut_among_those_of_a_verify_pass(pair: Pair, chunks: ChunkSettings) -> None:
    """A pass verified nine tokens, of which some were accepted: the cut goes by the query at the last settled one."""
    runner, text = full_runner(pair, 200), random_tokens(120, seed=9)
    ask(runner, Statement(1, text[:110], 1), max_length=150)
    ask(runner, Statement(1, text[:119], 9), max_length=150)
    record = recorded(pair, text)
    for position in (111, 115, 119):
        snapshot = full_kv(runner).cut(1, position, chunks, MeanKey())
        assert_is_cut(snapshot, record, chunks)


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_landmarks_are_right_after_a_rollback(pair: Pair, chunks: ChunkSettings) -> None:
    """What was cut of one text must not colour the cut of another that shares its beginning."""
    rng = random.Random(chunks.chunk)
    runner, text = full_runner(pair, 200), random_tokens(150, seed=3)
    for _ in range(6):
        ask(runner, Statement(1, text, 1), max_length=200)
        snapshot = full_kv(runner).cut(1, len(text), chunks, MeanKey())
        assert_is_cut(snapshot, recorded(pair, text), chunks)
        kept = rng.randint(1, len(text))
        text = text[:kept] + random_tokens(rng.randint(90, 190), seed=rng.randrange(10**6))
        text = text[: rng.randint(90, 190)]


def test_the_settings_know_the_selectors_by_name() -> None:
    assert [*get_args(RetrievalSettings.model_fields["selector"].annotation)] == [*SELECTORS]


def test_recording_changes_nothing() -> None:
    pair = random_pair()
    text = random_tokens(30, seed=1)
    expected = plain_logits(pair.theirs, text)
    pair.theirs.set_attn_implementation("recording")
    record = Recorded()
    with torch.inference_mode():
        output = pair.theirs(input_ids=torch.tensor([text]), use_cache=False, record=record)
    torch.testing.assert_close(output.logits[0], expected)
