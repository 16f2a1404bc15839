"""Choosing CPU threads: the search by itself on machines of given speeds, what is kept, and what a pass leaves."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from triforce_core.config import Settings, load_settings
from triforce_core.engine import kept_threads, local_threads
from triforce_core.engine.inspection import runners_of
from triforce_core.engine.kept_threads import keep_threads
from triforce_core.engine.limits import Limits
from triforce_core.engine.loading import load_local_engine
from triforce_core.engine.local_threads import choose_threads
from triforce_core.engine.thread_search import Arrangement, ThreadSearch
from triforce_core.engine.warm_up import LONG_PROMPT, PATIENCE_S, WarmUp
from triforce_core.kv.base import Forward
from triforce_core.messages import GREEDY, SequenceSpec, Span, Tier
from triforce_core.models.threads import ALL_THREADS, Threads, run_on

TIERS = ("target", "retrieval", "draft")
Milliseconds = dict[str, dict[int, float]]  # of a tier's part of a round, by its threads


def search(most: dict[str, int], ms: Milliseconds, noise: float = 0.0) -> Arrangement:
    """What the search finds if rounds take this long, give or take a share. The first round after a change takes much
    longer.
    """
    it, rng, before = ThreadSearch(most, most), random.Random(7), {}
    for _ in range(10_000):
        if it.done:
            return it.best
        changed, before = it.arrangement != before, it.arrangement
        seconds = sum(ms[tier][threads] for tier, threads in before.items()) / 1e3
        it.took(1.0 if changed else seconds * rng.uniform(1 - noise, 1 + noise), 4)
    raise AssertionError("the search does not end")


@pytest.mark.parametrize(
    ("ms", "expected"),
    [
        ({"target": {1: 78, 2: 49}, "retrieval": {1: 33, 2: 26}, "draft": {1: 9, 2: 8}}, (2, 1, 1)),
        ({"target": {1: 20, 2: 30}, "retrieval": {1: 30, 2: 16}, "draft": {1: 3, 2: 9}}, (1, 2, 1)),
        ({"target": {1: 20, 2: 18}, "retrieval": {1: 20, 2: 18}, "draft": {1: 20, 2: 18}}, (1, 1, 1)),
        ({"target": {1: 90, 2: 45}, "retrieval": {1: 90, 2: 45}, "draft": {1: 90, 2: 45}}, (2, 2, 2)),
    ],
)
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_more_threads_are_taken_where_they_pay_and_fewer_in_a_tie(
    ms: Milliseconds, expected: tuple[int, ...], noise: float
) -> None:
    assert tuple(search(dict.fromkeys(TIERS, 2), ms, noise).values()) == expected


def test_threads_are_halved_while_that_costs_nothing() -> None:
    perfect = {"target": {n: 48 / n for n in range(1, 13)}}
    assert search({"target": 12}, perfect) == {"target": 12}
    until_three = {"target": {1: 80, 3: 41, 6: 39, 12: 38}}
    assert search({"target": 12}, until_three) == {"target": 3}
    overhead = {"target": {1: 10, 2: 14, 4: 20, 8: 40}}
    assert search({"target": 8}, overhead) == {"target": 1}


def test_where_there_is_one_thread_or_nothing_to_choose_the_search_is_over() -> None:
    assert ThreadSearch({}, TIERS).done
    assert ThreadSearch({"target": 1, "draft": 1}, TIERS).done
    assert ThreadSearch({"target": 1}, TIERS).best == {"target": 1}
    assert ThreadSearch({"target": 2}, ["draft"]).done


LIMITS = Limits(context_length=16384, kv_pool_tokens=32768, vocab_size=4096)


def test_the_warm_up_covers_a_short_prompt_a_chunk_and_a_long_context() -> None:
    settings = load_settings(retrieval={"refresh_every": 10})
    warming = WarmUp(settings, LIMITS, {})
    prompts, lookaheads = [], []
    for request in warming.requests():
        LIMITS.check(request)
        lookaheads.append(request.lookaheads)
        prompts.append(len(request.prompt))
        taken = 1
        while warming.round_ended(4):
            taken += 1
        assert 4 * taken >= 21, "two snapshots were cut, or more"
        assert request.sampling.temperature == (0.0 if len(prompts) == 4 else 1.0), "both kinds of draws"
    assert prompts == [64, 64, 2048, LONG_PROMPT]
    assert lookaheads == [(8, 3), (0, 0), (0, 3), (8, 3)], "all tiers, the target alone, without the retrieval tier"


def test_the_target_s_threads_are_those_that_it_is_fastest_with_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's passes are faster with two threads, and the passes of the drafting tiers with one. In rounds that
    verify eleven drafts the target's gain counts as a tie. But where nothing is drafted, every token would take longer
    with one thread.
    """
    now, searched = 0.0, []
    monkeypatch.setattr("triforce_core.engine.warm_up.time.perf_counter", lambda: now)
    warming = WarmUp(load_settings(), LIMITS, dict.fromkeys(TIERS, 2))
    for request in warming.requests():
        now += len(request.prompt) / 4000
        drafts = sum(request.lookaheads or ())
        searched.append((len(request.prompt), drafts, dict(warming.threads)))
        while warming.round_ended(1 + drafts):
            target, *drafting = warming.threads.values()
            now += {1: 0.03, 2: 0.02}[target] + drafts * 0.004 * sum(drafting)
    assert [seen[:2] for seen in searched] == [(64, 11), (64, 0), (2048, 3), (LONG_PROMPT, 0), (LONG_PROMPT, 11)]
    assert searched[-1][2] == {"target": 2, "retrieval": 2, "draft": 2}
    assert warming.search.done
    assert warming.search.best == {"target": 2, "retrieval": 1, "draft": 1}


def test_a_slow_machine_s_prompts_are_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("triforce_core.engine.warm_up.time.perf_counter", lambda: now)
    warming = WarmUp(load_settings(), LIMITS, {})
    prompts = []
    for request in warming.requests():
        prompts.append(len(request.prompt))
        now += len(request.prompt) / 100  # a hundred tokens a second
        while warming.round_ended(9):
            now += 0.1
    assert prompts == [64, 64, 100 * PATIENCE_S, 100 * PATIENCE_S]


def test_a_cold_first_pass_does_not_shorten_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("triforce_core.engine.warm_up.time.perf_counter", lambda: now)
    warming = WarmUp(load_settings(), LIMITS, {})
    prompts = []
    for request in warming.requests():
        now += 9.0 if not prompts else 0.2 + len(request.prompt) / 4000
        prompts.append(len(request.prompt))
        while warming.round_ended(9):
            now += 0.1
    assert prompts[-1] > 6000


@pytest.mark.parametrize("context", [2, 9, 300])
def test_small_contexts_are_warmed_up_within_them(context: int) -> None:
    limits = Limits(context, 2 * context, 50)
    for request in WarmUp(load_settings(), limits, {}).requests():
        limits.check(request)


def test_the_search_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("triforce_core.engine.warm_up.time.perf_counter", lambda: now)
    warming = WarmUp(load_settings(), LIMITS, {"target": 64, "draft": 64})
    tried = []
    for _ in warming.requests():
        began = now
        now += 1.0
        while warming.round_ended(13):
            now += 2.0
        tried.append(warming.threads)
        assert now - began < 30
    assert tried[-2:] == [{"target": 32, "draft": 64}, {"target": 64, "draft": 32}], "in trial, when time was up"
    assert not warming.search.done
    assert warming.search.best == {"target": 64, "draft": 64}, "as it was before: a slow round is of a large model"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where threads are kept. It is found in the usual way."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kept_threads, "ALL_THREADS", 4)
    return tmp_path / "triforce-serve"


def test_threads_are_kept_by_tier_and_model(folder: Path) -> None:
    settings, other = load_settings(), load_settings(draft={"model": "ngram"})
    assert kept_threads.kept_threads(settings, "target") is None
    keep_threads(settings, "target", 2)
    keep_threads(settings, "draft", 1)
    keep_threads(settings, "target", 3)
    assert kept_threads.kept_threads(settings, "target") == 3
    assert kept_threads.kept_threads(settings, "draft") == 1
    assert kept_threads.kept_threads(settings, "retrieval") is None
    assert kept_threads.kept_threads(other, "target") is None
    assert kept_threads.kept_threads(load_settings(server={"port": 81}), "target") == 3, "a port is no matter"


def test_another_machine_s_threads_are_not_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_threads(load_settings(), "target", 2)
    with monkeypatch.context() as later:
        later.setattr(kept_threads.triforce_core, "__version__", "another")
        assert kept_threads.kept_threads(load_settings(), "target") is None, "other software may be fastest with others"
    monkeypatch.setattr(kept_threads, "cpu_name", lambda: "another")
    assert kept_threads.kept_threads(load_settings(), "target") is None


@pytest.mark.parametrize("content", ["", "{", "[]", '"text"', '{"target-0": 2}'])
def test_a_file_that_is_no_use_is_as_good_as_none(folder: Path, content: str) -> None:
    folder.mkdir()
    (folder / "threads.json").write_text(content)
    assert kept_threads.kept_threads(load_settings(), "target") is None
    keep_threads(load_settings(), "target", 2)
    assert kept_threads.kept_threads(load_settings(), "target") == 2


def test_where_nothing_can_be_written_nothing_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder.parent.joinpath("triforce-serve").write_text("a file where the folder should be")
    keep_threads(load_settings(), "target", 2)
    assert "cannot be kept" in caplog.text
    assert kept_threads.kept_threads(load_settings(), "target") is None


@pytest.mark.parametrize(
    ("settings", "chooses"),
    [
        ({}, True),
        ({"threads": 1}, False),
        ({"device": "cuda"}, False),
        ({"target": {"tensor_parallel": 2}}, False),
    ],
    ids=str,
)
def test_threads_that_are_set_are_not_chosen(settings: dict[str, object], chooses: bool) -> None:
    assert load_settings(**settings).chooses_threads is chooses


SMALL: Settings = load_settings(dtype="float32", max_sequences=1, target={"context_length": 512, "prefill_chunk": 128})


def test_a_chain_s_threads_are_measured_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are two threads to choose from, and decoding is real. Whatever is found, the next engine takes it
    as kept.
    """
    monkeypatch.setattr(local_threads, "ALL_THREADS", 2)
    monkeypatch.setattr("triforce_core.engine.thread_search.ROUNDS", 1)
    monkeypatch.setattr("triforce_core.engine.thread_search.TURNS", 1)
    engine = load_local_engine(SMALL)
    said: list[str] = []
    choose_threads(engine, SMALL, said.append)
    assert said == ["choosing CPU threads, once for this machine and these models"]
    assert engine.idle
    found = {tier: runner.threads and runner.threads.decode for tier, runner in runners_of(engine).items()}
    assert set(found) == {Tier.TARGET, Tier.RETRIEVAL, Tier.DRAFT}
    assert set(found.values()) <= {1, 2}
    together = SMALL.model_copy(update={"placement": load_settings(placement={"colocate": "all"}).placement})
    kept = {tier: kept_threads.kept_threads(together, tier.name.lower()) for tier in found}
    assert kept == found
    assert kept_threads.kept_threads(SMALL, "target") is None, "a server of three processes measures by itself"
    keep_threads(together, "draft", 3)
    monkeypatch.setattr(local_threads, "searched", lambda *_: pytest.fail("measured again"))
    choose_threads(engine, SMALL, said.append)
    assert len(said) == 1
    assert runners_of(engine)[Tier.DRAFT].threads == Threads(3, ALL_THREADS)


def test_each_pass_has_its_own_threads_whatever_ran_before() -> None:
    engine = load_local_engine(SMALL)
    runner = runners_of(engine)[Tier.TARGET]
    runner.threads = Threads(decode=2, prefill=3)
    seen: list[int] = []
    runner.model.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    spec = SequenceSpec(GREEDY, 0, 200, 300)
    before = torch.get_num_threads()
    try:
        for stop in (100, 101, 102):
            run_on(5)  # another runner's
            runner.forward([Forward(Span(1, 0, tuple(range(stop)), spec), 1)])
            assert torch.get_num_threads() == 2, "what follows a pass is small work"
        assert seen == [3, 2, 2]
    finally:
        torch.set_num_threads(before)
