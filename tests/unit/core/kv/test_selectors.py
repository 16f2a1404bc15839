"""Every selector's choice of chunks against a dense reference, computed from the raw queries and keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.random_models import Pair, random_pair, random_tokens
from tests.recording import Recorded, recorded
from tests.stating import fragment, full_kv, full_runner, geometry
from triforce_core.attention import KERNELS, Scoring
from triforce_core.kv.base import Batch, Forward, KVGeometry
from triforce_core.kv.cutting import LayerChunks, SnapshotCutter
from triforce_core.kv.full import FullKV
from triforce_core.kv.mass import MOST_LOGITS, attention_mass
from triforce_core.kv.offloaded import Offload, OffloadedKV
from triforce_core.kv.selectors import SELECTORS
from triforce_core.kv.selectors.mean_key import mean_keys
from triforce_core.kv.selectors.mean_key import shares as shares_of_means
from triforce_core.kv.snapshot import ChunkSettings
from triforce_core.messages import GREEDY, SequenceSpec, Span
from triforce_core.models.runner import ModelRunner

Tokens = tuple[int, ...]
CHUNKS = ChunkSettings(96, 8, 16)
PROMPT, LENGTH = 333, 420
RECENT, WINDOW = 8, 8  # queries of the full cache's reading, and of snapkv


@pytest.fixture(scope="module", params=[(4, 4), (4, 2), (8, 2)], ids="heads={0[0]}/{0[1]}".format)
def pair(request: pytest.FixtureRequest) -> Pair:
    heads, kv_heads = request.param
    pair = random_pair(num_attention_heads=heads, num_key_value_heads=kv_heads, seed=heads + kv_heads)
    pair.theirs.set_attn_implementation("recording")
    return pair


def state(runner: ModelRunner, tokens: Tokens, sampled: int, selector: str) -> None:
    """The sequence is `tokens`; the last `sampled` of them are sampled, so that all but the first may be drafts."""
    runner.forward([Forward(Span(1, 0, tokens, spec(selector)), sampled)])


def spec(selector: str) -> SequenceSpec:
    return SequenceSpec(GREEDY, seed=0, prompt_length=1, max_length=LENGTH, selector=selector)


def read_prompt(runner: ModelRunner, text: Tokens, chunk: int, selector: str) -> None:
    """The prompt as the engine reads it: chunks without samples, but for the last."""
    for stop in [*range(chunk, PROMPT, chunk), PROMPT]:
        state(runner, text[:stop], int(stop == PROMPT), selector)


def decode(runner: ModelRunner, text: Tokens, selector: str) -> Iterator[int]:
    """Run rounds of up to nine tokens, of which the last are drafts that turn out wrong. After each round, yield the
    position up to which the text is settled and held.
    """
    settled, accepted = PROMPT, (0, 4, 8, 1, 7)
    while settled + 10 < LENGTH:
        num_accepted = accepted[settled % 5]
        wrong = tuple(255 - token for token in text[settled + 1 + num_accepted : settled + 9])
        state(runner, text[: settled + 1 + num_accepted] + wrong, 9, selector)
        settled += 1 + num_accepted
        yield settled


def chosen(kv: FullKV, position: int, name: str) -> Tensor:
    """[layers, kv_heads, chunks]"""
    with torch.inference_mode():
        return SnapshotCutter(kv, kv.held[1], position, CHUNKS, SELECTORS[name]()).choose()


# -- the dense references ----------------------------------------------------------------------------------------------


def weights(queries: Tensor, keys: Tensor) -> Tensor:
    """Causal attention weights, [heads of the group, queries, keys], in double precision."""
    logits = queries.double() @ keys.double().T / keys.shape[-1] ** 0.5
    return logits.masked_fill(torch.ones(logits.shape[-2:]).triu(1).bool(), -torch.inf).softmax(-1)


def by_chunk(of_tokens: Tensor, count: int) -> Tensor:
    return torch.stack([of_tokens[..., i * CHUNKS.chunk : (i + 1) * CHUNKS.chunk].sum(-1) for i in range(count)], -1)


def of_means(queries: Tensor, keys: Tensor, count: int, last: int) -> Tensor:
    means = torch.stack([keys[i * CHUNKS.chunk : (i + 1) * CHUNKS.chunk].mean(0) for i in range(count)])
    return (queries[:, -last:] @ means.T / keys.shape[-1] ** 0.5).softmax(-1).sum((0, 1))


# By selector: queries [heads of the group, tokens, head_dim] and keys [tokens, head_dim] before the cut, and the number
# of chunks → how much each is wanted.
DENSE: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "mean_key": lambda q, k, count: of_means(q, k, count, 1),
    "snapkv": lambda q, k, count: by_chunk(weights(q, k)[:, -WINDOW:].sum((0, 1)), count),
    "h2o": lambda q, k, count: by_chunk(weights(q, k).sum((0, 1)), count),
    "streaming": lambda q, k, count: torch.arange(float(count)),
}


def dense_choice(name: str, record: Recorded, position: int) -> Tensor:
    """[layers, kv_heads, chunks]"""
    local_start, num_chosen = CHUNKS.split(position)
    first_local, complete = local_start // CHUNKS.chunk, position // CHUNKS.chunk
    layers = []
    for queries, keys in zip(record.queries, record.keys, strict=True):
        heads = []
        for own, head in zip(queries.unflatten(0, (len(keys), -1)), keys, strict=True):
            wanted = DENSE[name](own[:, :position], head[:position], first_local)
            wanted[0] = torch.inf
            best = sorted(wanted.argsort(descending=True)[:num_chosen].tolist())
            heads.append([*best, *range(first_local, complete)])
        layers.append(heads)
    return torch.tensor(layers)


@pytest.mark.parametrize("in_pieces", [False, True])
def test_sums_of_chunks_are_causal_in_each_piece_of_keys(pair: Pair, in_pieces: bool) -> None:
    """Queries do not see the keys behind their own, which lie in the recent window, also where that begins a piece."""
    text = random_tokens(LENGTH, seed=7)
    record, runner = recorded(pair, text), full_runner(pair, 3 * LENGTH)
    if in_pieces:
        fragment(runner.kv, 328, LENGTH)  # so that the last piece of the prompt is its last five tokens
    read_prompt(runner, text, 2048, "snapkv")
    kv, (local_start, _) = full_kv(runner), CHUNKS.split(PROMPT)
    assert (len(kv.held[1].ranges) > 1) == in_pieces
    with torch.inference_mode():
        cutter = SnapshotCutter(kv, kv.held[1], PROMPT, CHUNKS, SELECTORS["snapkv"]())
        for layer, (queries, keys) in enumerate(zip(record.queries, record.keys, strict=True)):
            sums = LayerChunks(cutter, layer, local_start // CHUNKS.chunk).log_sums().softmax(-1)
            for own, head, found in zip(queries.unflatten(0, (len(keys), -1)), keys, sums, strict=True):
                exact = weights(own[:, :PROMPT], head[:PROMPT])[:, -WINDOW:].flatten(0, 1)
                expected = torch.stack([each.sum(-1) for each in exact.split(CHUNKS.chunk, dim=-1)], dim=-1)
                torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


def test_all_selectors_have_a_reference() -> None:
    assert DENSE.keys() == SELECTORS.keys()


@pytest.mark.parametrize(("chunk", "in_pieces"), [(1, False), (64, False), (2048, False), (64, True)])
@pytest.mark.parametrize("name", SELECTORS)
def test_the_choice_is_that_of_dense_attention(pair: Pair, name: str, chunk: int, in_pieces: bool) -> None:
    """It is so however the prompt was chunked, and in every round of decoding. Rejected drafts leave no trace."""
    text = random_tokens(LENGTH, seed=7)
    record, runner = recorded(pair, text), full_runner(pair, 3 * LENGTH)
    if in_pieces:
        fragment(runner.kv, 150, LENGTH)
    read_prompt(runner, text, chunk, name)
    assert torch.equal(chosen(full_kv(runner), PROMPT, name), dense_choice(name, record, PROMPT))
    assert (len(full_kv(runner).held[1].ranges) > 1) == in_pieces
    cuts = 0
    for number, position in enumerate(decode(runner, text, name)):
        if number % 3 == 0:  # `h2o` counts queries at each cut as well, so some rounds have no cut
            cuts += 1
            assert torch.equal(chosen(full_kv(runner), position, name), dense_choice(name, record, position))
    assert cuts > 3


def test_the_selectors_choose_differently(pair: Pair) -> None:
    """So no selector can pass for another. All but `streaming` choose by layer and head."""
    record = recorded(pair, random_tokens(LENGTH, seed=7))
    choices = {name: dense_choice(name, record, LENGTH) for name in SELECTORS}
    assert len({tuple(choice.flatten().tolist()) for choice in choices.values()}) == len(SELECTORS)
    for name, choice in choices.items():
        differing = len({tuple(head.tolist()) for head in choice.flatten(0, 1)})
        assert (differing > 1) == (name != "streaming")


def test_landmarks_choose_alike_however_the_prompt_came(pair: Pair) -> None:
    """Neither passes of other lengths nor cuts in between change the choice."""
    text, found = random_tokens(LENGTH, seed=3), []
    for chunk in (1, 64, 2048):
        runner = full_runner(pair, LENGTH)
        for stop in [*range(chunk, PROMPT, chunk), PROMPT]:
            state(runner, text[:stop], 0, "mean_key")
            if chunk == 64:
                chosen(full_kv(runner), stop, "mean_key")
        found.append(chosen(full_kv(runner), PROMPT, "mean_key"))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_landmarks_are_made_chunk_by_chunk() -> None:
    """The landmarks of two halves are the landmarks of the whole. So the landmarks of a growing text can be kept."""
    keys = torch.randn(2, 12, 8, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(torch.cat([mean_keys(keys[:, :5]), mean_keys(keys[:, 5:])], 1), mean_keys(keys))


def test_query_heads_of_a_group_share_their_vote() -> None:
    """Within a group the order of heads does not matter; a head that moves to another group takes its vote with it."""
    generator = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(6, 3, 16, generator=generator), torch.randn(2, 40, 8, 16, generator=generator)
    landmarks = mean_keys(keys)
    scores = shares_of_means(queries, landmarks)
    assert scores.shape == (2, 40)
    torch.testing.assert_close(shares_of_means(queries[[2, 0, 1, 3, 5, 4]], landmarks), scores)
    assert not torch.allclose(shares_of_means(queries[[3, 1, 2, 0, 4, 5]], landmarks), scores)
    louder = queries.clone()
    # Three heads share a KV head. The loud one can move its own third of the votes to other chunks, and no more.
    louder[0] *= 1000
    moved = (shares_of_means(louder, landmarks) - scores).abs().sum(1)
    assert 0.1 < moved[0] <= 2 / 3 + 1e-5
    assert moved[1] == 0


# -- attention mass ----------------------------------------------------------------------------------------------------


def test_mass_is_that_of_dense_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is computed in one piece and in many."""
    generator = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(3, 40, 16, generator=generator), torch.randn(100, 16, generator=generator)
    logits = queries.double() @ keys.double().T / 4
    future = torch.arange(100) > torch.arange(60, 100)[:, None]
    expected = logits.masked_fill(future, -torch.inf).softmax(-1).sum((0, 1)).float()
    for most in (1 << 24, 2100, 1):
        monkeypatch.setitem(MOST_LOGITS, "cpu", most)
        torch.testing.assert_close(attention_mass(queries, keys), expected)


def test_mass_counts_settled_queries_only_and_few_wait(pair: Pair) -> None:
    """The mass of n tokens is that of n queries: each query gives one in all for each query head."""
    text = random_tokens(LENGTH, seed=5)
    runner = full_runner(pair, LENGTH)
    read_prompt(runner, text, 64, "h2o")
    group = runner.model.config.num_attention_heads // runner.model.config.num_key_value_heads
    held, counted = full_kv(runner).held[1], set()
    for settled in decode(runner, text, "h2o"):
        for mass in held.mass.values():
            tokens = mass.shape[1]
            assert settled - 64 - 9 <= tokens <= settled, "of settled queries, all but a few"
            torch.testing.assert_close(mass.sum(1), torch.full((len(mass),), float(group * tokens)))
            counted.add(tokens)
        kept = held.queries
        assert all(kept.of(layer).shape[1] == len(kept.positions) for layer in range(kept.num_layers))
        assert len(kept.positions) <= 64 + 2 * 9
    assert len(counted) > 1, "some were counted in rounds of decoding"


def test_only_selectors_of_all_queries_keep_mass_and_many_queries(pair: Pair) -> None:
    text = random_tokens(LENGTH, seed=5)
    for name in SELECTORS:
        runner = full_runner(pair, LENGTH)
        read_prompt(runner, text, 2048, name)
        held = full_kv(runner).held[1]
        wanted = SELECTORS[name]().num_queries
        assert bool(held.mass) == (wanted is None)
        assert len(held.queries.positions) <= (64 if wanted is None else max(wanted, RECENT))


def test_a_prompt_with_logprobs_counts_every_query_once(pair: Pair) -> None:
    """All positions of its chunks are sampled, and the last token of each chunk is forwarded again with the next."""
    text = random_tokens(LENGTH, seed=5)
    runner, record = full_runner(pair, LENGTH), recorded(pair, random_tokens(LENGTH, seed=5))
    for start, stop in ((0, 150), (150, 300), (300, PROMPT)):
        state(runner, text[:stop], stop - max(0, start - 1), "h2o")
    assert torch.equal(chosen(full_kv(runner), PROMPT, "h2o"), dense_choice("h2o", record, PROMPT))
    group = runner.model.config.num_attention_heads // runner.model.config.num_key_value_heads
    for mass in full_kv(runner).held[1].mass.values():
        torch.testing.assert_close(mass.sum(1), torch.full((len(mass),), float(group * PROMPT)))


# -- other places ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SELECTORS)
def test_an_offloaded_cache_chooses_the_same(pair: Pair, name: str) -> None:
    text = random_tokens(LENGTH, seed=11)
    resident = full_runner(pair, LENGTH)
    offloaded = ModelRunner(pair.ours, OffloadedKV(geometry(pair), LENGTH, KERNELS["cpu_flash"], Offload(1)))
    runners = (resident, offloaded)
    for runner in runners:
        read_prompt(runner, text, 64, name)
    for position, _ in zip(*(decode(runner, text, name) for runner in runners), strict=True):
        ours, theirs = (chosen(full_kv(runner), position, name) for runner in runners)
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", SELECTORS)
def test_each_rank_chooses_for_its_own_heads_as_one_process_would(name: str) -> None:
    layers, heads, kv_heads, dim = 2, 8, 4, 16

    def cache(kv_heads: int) -> FullKV:
        return FullKV(
            KVGeometry(layers, kv_heads, dim, torch.float32, torch.device("cpu")), LENGTH, KERNELS["cpu_flash"]
        )

    whole, ranks = cache(kv_heads), (cache(kv_heads // 2), cache(kv_heads // 2))
    text = random_tokens(LENGTH, seed=2)
    for stop, sampled in ((150, 0), (300, 0), (PROMPT, 1), (PROMPT + 9, 9), (PROMPT + 18, 9)):
        forward = Forward(Span(1, 0, text[:stop], spec(name)), sampled)
        batches: list[Batch] = [kv.prepare([forward]) for kv in (whole, *ranks)]
        for layer in range(layers):
            generator = torch.Generator().manual_seed(100 * stop + layer)
            size = batches[0].num_tokens, dim
            queries, keys, values = (torch.randn(n, *size, generator=generator) for n in (heads, kv_heads, kv_heads))
            whole.attend(layer, queries, keys, values, Scoring(0.25), batches[0])
            parts = zip(*(each.chunk(2) for each in (queries, keys, values)), strict=True)
            for kv, part, batch in zip(ranks, parts, batches[1:], strict=True):
                kv.attend(layer, *part, Scoring(0.25), batch)
    position = PROMPT + 12
    together = torch.cat([chosen(kv, position, name) for kv in ranks], dim=1)
    assert torch.equal(together, chosen(whole, position, name))
