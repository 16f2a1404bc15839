"""Tiers whose ranks are actors: the tokens of one process, and a tier that comes back whole when it loses a rank."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest
import torch
from ray.actor import ActorHandle

from actors import supervisor as supervision
from actors.supervisor import Supervisor
from tests.conftest import HeldOut
from tests.dist.conftest import StartPipeline
from tests.dist.decoding import Tiers
from tests.dist.test_faults import NUM_TOKENS, decode, pid_of, proposed_by, wait_for_drafts
from tests.dist.test_pipeline import request
from tests.rank_process import RankProcess
from triforce_core.building.loading import load_local_engine
from triforce_core.config import load_settings
from triforce_core.engine.engine import run_to_end
from triforce_core.engine.sequence import Request
from triforce_core.errors import UnavailableError
from triforce_core.kv.snapshot import Snapshot
from triforce_core.messages import SamplingParams, Tier
from triforce_core.models import rank_group
from triforce_core.models.rank_group import COLLECTIVE_TIMEOUT_S, Leader, pass_timeout_s

pytestmark = pytest.mark.slow
SETTINGS = load_settings(
    dtype="float32",
    max_sequences=2,
    target={"tensor_parallel": 2, "kv_pool_tokens": 4000, "prefill_chunk": 500},
    retrieval={"budget": 256, "refresh_every": 24},
)
WHOLE = SETTINGS.model_copy(update={"target": SETTINGS.target.model_copy(update={"tensor_parallel": 1})})


def pid(actor: ActorHandle[Any]) -> int:
    import ray

    return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=60))


def plain(prompt: tuple[int, ...], seed: int, temperature: float, count: int) -> list[int]:
    """The tokens that the target alone gives in this process."""
    asked = Request(prompt, count, SamplingParams(temperature, top_p=0.95 if seed % 2 else 1.0), seed, (0, 0))
    return [
        token for output in run_to_end(load_local_engine(WHOLE, drafting=False), [asked]) for token in output.tokens
    ]


def test_pairs_of_actors_give_the_tokens_of_one_process(start_pipeline: StartPipeline, held_out: HeldOut) -> None:
    prompt = held_out("inspect.py", 700)
    with start_pipeline(SETTINGS) as (runner, pipeline):
        tiers = Tiers(pipeline, runner.run)
        pids = [pid(actor) for actor in (*pipeline.actors.each(), *pipeline.actors.followers)]
        assert len(set(pids)) == 5, "two pairs, and the draft tier"
        asked = [request(prompt, seed=seed, temperature=temperature) for seed, temperature in ((0, 0.0), (1, 0.8))]
        for decoded, (seed, temperature) in zip(tiers.decode(*asked), ((0, 0.0), (1, 0.8)), strict=True):
            assert decoded.tokens == plain(prompt, seed, temperature, 60)
            assert set(decoded.origins) == {0, 1, 2}
            assert decoded.stats[-1].snapshots > 1
        tiers.wait_idle()
    until = time.monotonic() + 10
    while alive := [p for p in pids if os.path.exists(f"/proc/{p}/exe")]:
        assert time.monotonic() < until, f"{alive} outlive their pipeline"
        time.sleep(0.05)


@pytest.mark.parametrize("leads", [False, True], ids=["follower", "leader"])
def test_a_retrieval_tier_that_loses_a_rank_changes_no_token_and_comes_back(
    start_pipeline: StartPipeline, held_out: HeldOut, leads: bool
) -> None:
    prompt = held_out("inspect.py", 600)
    with start_pipeline(SETTINGS) as (runner, pipeline):
        [of_retrieval, _] = pipeline.actors.followers
        expected, undisturbed = runner.run(decode(pipeline, prompt))
        assert len(expected) == NUM_TOKENS
        before = {pid_of(pipeline, Tier.RETRIEVAL), pid(of_retrieval)}
        victim = pid_of(pipeline, Tier.RETRIEVAL) if leads else pid(of_retrieval)
        tokens, origins = runner.run(decode(pipeline, prompt, lambda: os.kill(victim, signal.SIGKILL)))
        assert tokens == expected
        assert proposed_by(Tier.RETRIEVAL, origins) < proposed_by(Tier.RETRIEVAL, undisturbed)
        wait_for_drafts(runner, pipeline, prompt)
        assert before.isdisjoint({pid_of(pipeline, Tier.RETRIEVAL), pid(of_retrieval)}), "both ranks are new"
        assert runner.run(decode(pipeline, prompt))[0] == expected


@pytest.mark.parametrize("hangs", [False, True], ids=["that dies", "that hangs while the leader dies"])
def test_a_target_that_loses_a_rank_is_replaced_with_all_its_ranks(
    start_pipeline: StartPipeline, held_out: HeldOut, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    if hangs:
        # The first start is good, and nothing waits for the one that hangs.
        monkeypatch.setattr(supervision, "MAX_FAILURES", 1)
    prompt = held_out("inspect.py", 600)
    with start_pipeline(SETTINGS) as (runner, pipeline):
        [of_retrieval, of_target] = pipeline.actors.followers
        expected, _ = runner.run(decode(pipeline, prompt))
        before = {leader := pid_of(pipeline, Tier.TARGET), victim := pid(of_target)}
        drafting = [pid_of(pipeline, Tier.DRAFT), pid_of(pipeline, Tier.RETRIEVAL), pid(of_retrieval)]

        def fault() -> None:
            if hangs:
                os.kill(victim, signal.SIGSTOP)
                os.kill(leader, signal.SIGKILL)
            else:
                os.kill(victim, signal.SIGKILL)

        async def replaced() -> list[int]:
            supervisor = asyncio.create_task(Supervisor(pipeline, SETTINGS).run())
            with pytest.raises(UnavailableError):
                await decode(pipeline, prompt, fault)
            tokens, _ = await decode(pipeline, prompt)
            supervisor.cancel()
            return tokens

        assert runner.run(replaced()) == expected
        assert before.isdisjoint({pid_of(pipeline, Tier.TARGET), pid(of_target)}), "both ranks are new"
        assert drafting == [pid_of(pipeline, Tier.DRAFT), pid_of(pipeline, Tier.RETRIEVAL), pid(of_retrieval)]


class Ended(Exception):
    """Raised where this process would end."""


@pytest.mark.parametrize("gathered", [False, True], ids=["in a pass", "for a snapshot"])
def test_a_follower_that_hangs_is_noticed_soon(monkeypatch: pytest.MonkeyPatch, gathered: bool) -> None:
    def end(self: Leader) -> None:
        raise Ended

    monkeypatch.setattr(Leader, "end", end)
    monkeypatch.setattr(rank_group, "PASS_TIMEOUT_S", 1.0)
    rank = RankProcess()
    asked = Request(tuple(range(1, 60)), 20, SamplingParams(0.0), 0, (4, 2))
    nothing = torch.zeros(1, 1, 0, 8)

    def decode_without_it() -> None:
        with rank.lead(SETTINGS, ("target", "retrieval")) as leader:
            engine = load_local_engine(SETTINGS, ranks=leader)
            assert sum(len(output.tokens) for output in run_to_end(engine, [asked])) == 20
            os.kill(rank.process.pid or 0, signal.SIGSTOP)
            began = time.monotonic()
            try:
                if gathered:
                    leader.gather(Snapshot(1, 1, 0, nothing, nothing))
                list(run_to_end(engine, [asked]))
            finally:
                leader.closing = True
                assert time.monotonic() - began < 15

    try:
        with pytest.raises(Ended):
            decode_without_it()
    finally:
        rank.process.kill()
        rank.process.join(10)


def test_a_long_pass_has_its_time() -> None:
    assert pass_timeout_s(9) < 15
    assert pass_timeout_s(9) < pass_timeout_s(500) < pass_timeout_s(2048) <= COLLECTIVE_TIMEOUT_S
    assert pass_timeout_s(32768) == COLLECTIVE_TIMEOUT_S
