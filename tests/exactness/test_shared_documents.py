"""Requests on one document read it once, and get the tokens that they would get alone in an empty pool.

After each turn every slot is accounted for. `Scheduler.told` counts the prompt tokens that were read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.exactness.cases import Case, models
from tests.exactness.test_ranks import saved, settings_for, with_ranks
from tests.integrity import check
from tests.random_models import random_tokens
from tests.rank_process import RankProcess
from triforce_core.building.assembly import local_engine
from triforce_core.building.loading import load_local_engine
from triforce_core.engine.engine import Engine
from triforce_core.engine.sequence import Output, Request, Stats
from triforce_core.kv.full import FullKV
from triforce_core.messages import SamplingParams
from triforce_core.models.replay import LeadingFullKV

Tokens = tuple[int, ...]
CASE = Case(0.8, 1.0, (4, 2), 128, 8, 5, 0.05, 0.1, (16, 200), 60)
BOTH = ("target", "retrieval")
DOCUMENT = random_tokens(600, seed=77)
MOST = 24


def engine(pool_tokens: int = 8192, selector: str | None = None, **target: object) -> Engine:
    settings = CASE.settings
    if selector:
        settings = settings.model_copy(
            update={"retrieval": settings.retrieval.model_copy(update={"selector": selector})}
        )
    changed = settings.target.model_copy(update={"kv_pool_tokens": pool_tokens, "prefill_chunk": 128, **target})
    of_target, of_retrieval, drafter = models(CASE)
    settings = settings.model_copy(update={"target": changed, "max_sequences": 8})
    return local_engine(of_target, drafter, settings, of_retrieval)


def question(n: int, document: Tokens = DOCUMENT, lookaheads: tuple[int, int] = (4, 2), **fields: object) -> Request:
    text = (*document, *random_tokens(9 + 4 * n, seed=n))
    sampling = SamplingParams(0.8, repetition_penalty=1.1) if n % 2 else SamplingParams(0.0)
    return Request(text, MOST, sampling, seed=n, lookaheads=lookaheads, **fields)  # type: ignore[arg-type]


def full_kv(it: Engine) -> FullKV:
    kv = it.scheduler.kv
    if isinstance(kv, LeadingFullKV):
        return kv.full
    assert isinstance(kv, FullKV)
    return kv


def run(it: Engine, asked: list[Request]) -> tuple[list[Tokens], list[Stats]]:
    """The tokens and the last figures of requests that arrive together."""
    outputs: dict[int, list[Output]] = {it.submit(request): [] for request in asked}
    while not it.idle:
        for output in it.run_once():
            outputs[output.sequence_id].append(output)
        check(full_kv(it))
    assert full_kv(it).used_tokens == 0
    tokens = [tuple(token for output in each for token in output.tokens) for each in outputs.values()]
    return tokens, [each[-1].stats for each in outputs.values()]


@pytest.fixture(scope="module")
def cold() -> Engine:
    return engine(prefix_cache=False)


def alone(cold: Engine, asked: list[Request]) -> list[Tokens]:
    found = [run(cold, [request]) for request in asked]
    assert not any(stats.cached_tokens for _, [stats] in found)
    return [tokens for [tokens], _ in found]


@pytest.mark.parametrize("lookaheads", [(4, 2), (0, 0), (0, 2)], ids=str)
def test_one_after_another(cold: Engine, lookaheads: tuple[int, int]) -> None:
    """The first request finds nothing. If it is repeated, its whole prompt is found. A request whose document goes on
    differently finds a part.
    """
    first, other = question(0, lookaheads=lookaheads), question(1, lookaheads=lookaheads)
    partial = question(2, (*DOCUMENT[:301], *random_tokens(200, seed=5)), lookaheads)
    asked = [first, other, first, partial, question(3, partial.prompt, lookaheads), other]
    it = engine()
    found = [run(it, [request]) for request in asked]
    assert [tokens for [tokens], _ in found] == alone(cold, asked)
    queries = 8 if lookaheads[0] else 1  # without the retrieval tier no snapshot is cut
    whole = [(len(request.prompt) - 1 - queries) // 8 * 8 for request in asked]
    assert [stats.cached_tokens for _, [stats] in found] == [
        0,
        600,
        whole[2],
        296,
        len(partial.prompt) // 8 * 8,
        whole[5],
    ]


@pytest.mark.parametrize("lookaheads", [(4, 2), (0, 0)], ids=str)
def test_all_at_once(cold: Engine, lookaheads: tuple[int, int]) -> None:
    """One request reads the document and the others wait for it, whichever has the shortest prompt."""
    asked = [question(n, lookaheads=lookaheads) for n in (3, 0, 1, 5, 2, 4, 7, 6)]
    it = engine()
    tokens, stats = run(it, asked)
    assert tokens == alone(cold, asked)
    assert sorted(each.cached_tokens for each in stats) == [0, *[600] * 7]
    assert it.scheduler.told == 600 + sum(len(request.prompt) - 600 for request in asked)


def test_the_pool_holds_a_shared_document_once() -> None:
    it = engine()
    for n in range(8):
        it.submit(question(n))
    most = 0
    while not it.idle:
        it.run_once()
        most = max(most, full_kv(it).used_tokens)
    room = 8 * (600 + 9 + 4 * 7 + MOST + 8)
    assert 600 < most < 600 + (room - 8 * 600)


def test_acceptance_after_a_hit_is_that_of_a_cold_run(cold: Engine) -> None:
    """The drafting tiers need nothing that is stored. They draft the same tokens, and the same tokens are accepted."""
    it = engine()
    asked = [replace(question(n), max_tokens=50) for n in range(3)]
    run(it, asked[:1])
    for request in asked:
        [hit], [of_hit] = run(it, [request])
        [expected], [of_cold] = run(cold, [request])
        assert hit == expected
        assert of_hit.cached_tokens >= 592
        assert [tally.counts for tally in of_hit.tallies] == [tally.counts for tally in of_cold.tallies]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("selector", "offload"),
    [
        pytest.param("mean_key", "none", marks=pytest.mark.slow),
        ("mean_key", "host"),
    ],
)
def test_landmarks_of_a_shared_document_choose_as_those_of_a_cold_run(selector: str, offload: str) -> None:
    """Landmarks lie in the pool beside the KV of their document. The pool has half of the room that is needed, so its
    slots are used again.
    """
    asked = [replace(question(n, random_tokens(600, seed=n % 3)), max_tokens=60) for n in (0, 3, 1, 4, 2, 0)]
    it = engine(1000, selector, offload=offload)
    assert full_kv(it).landmarks is not None
    without = engine(8192, selector, prefix_cache=False)
    hits = 0
    for request in asked:
        [found], [of_found] = run(it, [request])
        [expected], [of_cold] = run(without, [request])
        assert found == expected
        assert [tally.counts for tally in of_found.tallies] == [tally.counts for tally in of_cold.tallies]
        hits += of_found.cached_tokens > 0
    assert hits >= 2


def test_completions_of_one_prompt_share_it(cold: Engine) -> None:
    asked = [replace(question(1), seed=seed) for seed in range(4)]
    it = engine()
    tokens, stats = run(it, asked)
    assert tokens == alone(cold, asked)
    assert len(set(tokens)) == 4
    rest = len(asked[0].prompt) - stats[1].cached_tokens
    assert it.scheduler.told == len(asked[0].prompt) + 3 * rest


def test_what_must_be_read_anew(cold: Engine) -> None:
    """Logprobs of a prompt need all its logits, and `h2o` needs all its queries. Salts keep texts apart."""
    it = engine()
    run(it, [question(0), question(0, cache_salt="a")])
    asked = [
        question(1, prompt_logprobs=0),
        question(1, selector="h2o"),
        question(1, cache_salt="b"),
        question(1, cache_salt="a"),
        question(1),
    ]
    tokens, stats = run(it, asked)
    assert tokens == alone(cold, asked)
    assert [each.cached_tokens for each in stats] == [0, 0, 0, 600, 600]


def test_only_prompt_tokens_count_where_output_is_resumed(cold: Engine) -> None:
    it = engine()
    [whole], _ = run(it, [question(1)])
    resumed = replace(question(1), resume=whole[:20])
    [tokens], [stats] = run(it, [resumed])
    assert whole[:20] + tokens == whole
    assert it.scheduler.told < len(resumed.prompt) + 30, "some of the output was found, too"
    assert stats.cached_tokens == len(resumed.prompt) - len(resumed.prompt) % 8 or stats.cached_tokens == len(
        resumed.prompt
    )


def test_a_chat_hits_what_it_has_said(cold: Engine) -> None:
    it, text = engine(), DOCUMENT
    for turn in range(6):
        request = replace(question(turn, text), max_tokens=40)
        [tokens], [stats] = run(it, [request])
        assert [tokens] == alone(cold, [request])
        assert stats.cached_tokens >= len(text) - 24 or not turn
        text = (*request.prompt, *tokens)


@pytest.mark.ci
@pytest.mark.parametrize("lookaheads", [(4, 2), (0, 0)], ids=str)
def test_a_pool_of_half_the_need_drops_what_was_not_used_for_longest(cold: Engine, lookaheads: tuple[int, int]) -> None:
    documents = [random_tokens(500, seed=100 + n) for n in range(4)]
    asked = [question(n, documents[n % 4], lookaheads) for n in (0, 1, 2, 3, 0, 5, 6, 3, 2, 9)]
    it = engine(1100)
    expected = alone(cold, asked)
    tokens, stats = run(it, asked)
    assert tokens == expected
    assert full_kv(it).dropped_tokens > 0
    assert not any(each.preempted for each in stats), "kept texts go first"
    assert [run(it, [request])[0][0] for request in asked] == expected


def test_a_preempted_request_finds_its_own_text(cold: Engine) -> None:
    it = engine()
    [expected] = alone(cold, [replace(question(1), max_tokens=60)])
    request_id, outputs, told = it.submit(replace(question(1), max_tokens=60)), [], 0
    for turn in range(10**6):
        if it.idle:
            break
        if turn == 12:  # as if the pool were full
            [young] = it.scheduler.live.values()
            assert len(young.tokens) > young.given, "it is being decoded"
            it._drop(young)
            it.scheduler.add(young.again(next(it.ids)))
            told = it.scheduler.told
        outputs += it.run_once()
        check(full_kv(it))
    assert {output.sequence_id for output in outputs} == {request_id}
    assert tuple(token for output in outputs for token in output.tokens) == expected
    assert 0 < it.scheduler.told - told < 40
    assert outputs[-1].stats.cached_tokens == 0, "found when it was first admitted"


def test_a_short_request_does_not_wait_behind_a_long_one_with_the_same_beginning() -> None:
    system = random_tokens(256, seed=3)
    other = Request(random_tokens(700, seed=6), 2, SamplingParams(0.0), 0, (0, 0))
    long = Request((*system, *random_tokens(5000, seed=4)), 2, SamplingParams(0.0), 0, (0, 0))
    short = Request((*system, *random_tokens(20, seed=5)), 2, SamplingParams(0.0), 0, (0, 0))
    it = engine(16_384)
    ids = [it.submit(request) for request in (other, long, short)]
    first: list[int] = []
    while len(first) < 3:
        first += [o.sequence_id for o in it.run_once() if o.tokens and o.sequence_id not in first]
    assert first == [ids[2], ids[0], ids[1]]


def test_offloaded_documents_are_shared(cold: Engine) -> None:
    it = engine(offload="host", resident_layers=1)
    asked = [question(n) for n in range(4)]
    tokens, stats = run(it, asked)
    again, more = run(it, asked)
    assert tokens == again == alone(cold, asked)
    assert sum(each.cached_tokens for each in stats) == 1800
    assert min(each.cached_tokens for each in more) >= 592


@pytest.fixture(scope="module")
def rank() -> Iterator[RankProcess]:
    process = RankProcess()
    yield process
    process.close()


@pytest.mark.ci
def test_two_ranks_share_alike(rank: RankProcess, tmp_path: Path) -> None:
    """The pool is so small that texts are dropped. If the two ranks dropped different texts, tokens would change."""
    settings = settings_for(saved(tmp_path, "llama"))
    settings = settings.model_copy(
        update={"target": settings.target.model_copy(update={"kv_pool_tokens": 1600}), "max_sequences": 4}
    )
    documents = [random_tokens(500, seed=100 + n) for n in range(3)]
    asked = [question(n, documents[n % 3]) for n in (0, 3, 1, 4, 2, 5, 0)]
    expected = alone(load_local_engine(settings.cold), asked)
    with rank.lead(with_ranks(settings), BOTH) as ranks:
        it = load_local_engine(with_ranks(settings), ranks=ranks)
        tokens, _ = run(it, asked)
        again, stats = run(it, asked)
        assert full_kv(it).dropped_tokens > 0
    assert tokens == again == expected
    assert sum(each.cached_tokens for each in stats) > 500
