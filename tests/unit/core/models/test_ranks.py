"""What is refused of tensor parallelism before any process is started, and ranks that end with one another."""

from __future__ import annotations

import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import pytest
from transformers import GPT2Config, LlamaConfig, PreTrainedModel

from tests.command_line import Refusals
from tests.random_models import random_model
from tests.rank_process import RankProcess
from triforce_core.building import assembly, followers
from triforce_core.building.loading import load_local_engine
from triforce_core.building.runners import runner_for
from triforce_core.config import Settings, load_settings
from triforce_core.errors import InvalidValueError, UnavailableError, UnknownModelError, UnsupportedModelError
from triforce_core.kv.base import KVCache
from triforce_core.kv.full import FullKV
from triforce_core.kv.retrieval import RetrievalKV
from triforce_core.models.files import check_ranks
from triforce_core.models.load import ATTENTION
from triforce_core.models.rank_group import Follower, Leader, Rendezvous, follow_leader
from triforce_core.models.replay import LeadingKV
from triforce_core.models.runner import ModelRunner

DIVISIBLE = LlamaConfig(num_attention_heads=8, num_key_value_heads=4)


@pytest.mark.parametrize(
    ("world", "words"), [(3, "must divide the 8 attention heads"), (8, "must divide the 4 KV heads")]
)
def test_heads_must_divide(world: int, words: str) -> None:
    with pytest.raises(InvalidValueError, match=f"target.tensor_parallel: {world} {words} of 'm'"):
        check_ranks(DIVISIBLE, "m", world, "target.tensor_parallel")
    check_ranks(DIVISIBLE, "m", 4, "target.tensor_parallel")


def test_a_model_that_transformers_cannot_divide_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="model 'm': transformers has no tensor-parallel plan for gpt2"):
        check_ranks(GPT2Config(), "m", 2, "target.tensor_parallel")
    check_ranks(GPT2Config(), "m", 1, "target.tensor_parallel")


def test_the_retrieval_tier_is_divided_as_the_target_is_unless_said_otherwise() -> None:
    settings = load_settings(target={"tensor_parallel": 2})
    assert [settings.ranks((tier,)) for tier in ("draft", "retrieval", "target")] == [1, 2, 2]
    settings = load_settings(target={"tensor_parallel": 2}, retrieval={"tensor_parallel": 1})
    assert [settings.ranks(group.tiers) for group in settings.placement.groups] == [2, 1, 1]


def test_an_engine_without_the_ranks_that_it_needs_is_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"target\.tensor_parallel: 2 needs 2 ranks: this command has 1"):
        load_local_engine(load_settings(target={"tensor_parallel": 2}))


def test_every_rank_makes_its_runners_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU their passes are captured then, and to capture a pass is to run it, together with the other ranks."""
    model, made = random_model(), list[type[KVCache]]()
    model.set_attn_implementation(ATTENTION)

    def recording(model: PreTrainedModel, kv: KVCache | LeadingKV, settings: Settings, few_tokens: int) -> ModelRunner:
        made.append(type(kv.kv if isinstance(kv, LeadingKV) else kv))
        return runner_for(model, kv, settings, few_tokens)

    class Alone:
        """The leader of a group of one rank."""

        world = 1

        def barrier(self) -> None: ...

        def least(self, number: int) -> int:
            return number

    settings = load_settings(dtype="float32", draft={"model": "ngram"}, target={"kv_pool_tokens": 100})
    monkeypatch.setattr(followers, "load_model", lambda *_: model)
    monkeypatch.setattr(followers, "runner_for", recording)
    monkeypatch.setattr(assembly, "runner_for", recording)
    followers.executor_of(settings, ("target", "retrieval"), Alone())  # type: ignore[arg-type]
    of_follower, made[:] = [*made], []
    assembly.local_engine(model, None, settings, ranks=Alone())  # type: ignore[arg-type]
    assert of_follower == made == [RetrievalKV, FullKV]


def test_what_generate_cannot_divide_it_refuses(refusals: Refusals) -> None:
    named = ["target.tensor_parallel: 3", "must divide the 8 attention heads of 'demo'"]
    refusals.check(named, "generate", "--prompt-file", __file__, "--tensor-parallel", "3")


def test_followers_that_do_not_come_are_not_waited_for_long() -> None:
    rendezvous = Rendezvous(3)
    with pytest.raises(UnavailableError, match=r"only 0 of 2 other ranks came within 0.01 s"):
        rendezvous.lead("cpu", timeout_s=0.01)
    assert not rendezvous.folder.exists()


def test_ranks_agree_on_the_least_number_and_hear_of_a_failure() -> None:
    ours, theirs = multiprocessing.Pipe()
    leader, follower = Leader.__new__(Leader), Follower.__new__(Follower)
    leader.connections, follower.connections = [ours], [theirs]  # without processes and collectives
    for own, other, least in ((5, 3, 3), (2, 7, 2)):
        with ThreadPoolExecutor(1) as pool:
            answered = pool.submit(follower.least, other)
            assert leader.least(own) == answered.result(10) == least
    theirs.send(ValueError("no room here"))
    with pytest.raises(ValueError, match="no room here"):
        leader.barrier()


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_ends_with_the_other(victim: int) -> None:
    """One rank is killed by SIGKILL, which no process can answer. The other rank waits for nothing."""
    context = multiprocessing.get_context("spawn")
    (to_leader, of_leader), (to_follower, of_follower) = context.Pipe(), context.Pipe()
    leader = context.Process(target=lead_for_ever, args=(of_leader,))
    follower = context.Process(target=follow_for_ever, args=(of_follower,))
    leader.start()
    follower.start()
    to_follower.send(to_leader.recv())
    ranks = [leader, follower]
    assert to_leader.recv() == (follower.pid,)
    os.kill(ranks[victim].pid or 0, signal.SIGKILL)
    survivor = ranks[1 - victim]
    survivor.join(10)
    assert survivor.exitcode == 1
    ranks[victim].join(10)


@pytest.mark.slow
def test_what_a_follower_cannot_load_its_leader_raises() -> None:
    process = RankProcess()
    with (
        pytest.raises(UnknownModelError, match="'/nowhere' is not a directory"),
        process.lead(load_settings(dtype="float32", target={"model": "/nowhere"}), ("target",)) as leader,
    ):
        leader.barrier()
    process.process.join(10)
    assert process.process.exitcode == 1, "it cannot go on"


def lead_for_ever(calls: Connection) -> None:
    rendezvous = Rendezvous(2)
    calls.send(rendezvous.endpoint(1))
    leader = rendezvous.lead("cpu")
    leader.barrier()
    calls.send(leader.pids)
    calls.recv()


def follow_for_ever(calls: Connection) -> None:
    follower = follow_leader(calls.recv(), "cpu")
    follower.barrier()
    follower.receive()
