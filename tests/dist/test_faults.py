"""Drafting tiers that die or hang in mid-stream: the tokens stay the same, and the tiers come back."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from actors.pipeline import STATUS_TIMEOUT_S, Pipeline
from actors.wire import sampling_to_proto
from tests.conftest import HeldOut
from tests.dist.conftest import Running, StartPipeline
from triforce_core._gen.triforce.v1 import generation_pb2 as gen
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import load_settings
from triforce_core.messages import SamplingParams, Tier

NUM_TOKENS = 240
LINK_TIMEOUT_S = 2.0


SETTINGS = load_settings(
    dtype="bfloat16",
    max_sequences=2,
    retrieval={"budget": 256, "refresh_every": 24},
    server={"link_timeout_s": LINK_TIMEOUT_S},
)


@pytest.fixture(scope="module")
def running(start_pipeline: StartPipeline) -> Iterator[Running]:
    with start_pipeline(SETTINGS) as started:
        yield started


async def decode(tiers: Pipeline, prompt: tuple[int, ...], fault: Any = None) -> tuple[list[int], list[bytes]]:
    """The tokens and the origins of each block; after ten blocks the fault happens."""
    request = pb.DecodeRequest(
        prompt_token_ids=prompt,
        sampling=sampling_to_proto(SamplingParams(0.8)),
        seed=3,
        max_tokens=NUM_TOKENS,
        lookaheads=gen.Lookaheads(values=[8, 3]),
    )
    tokens: list[int] = []
    origins: list[bytes] = []
    async for event in tiers.decode(request):
        tokens += event.token_ids
        origins.append(event.origins)
        if len(origins) == 10 and fault is not None:
            fault()
    return tokens, origins


def pid_of(tiers: Pipeline, tier: Tier) -> int:
    import ray

    return int(ray.get(tiers.actors.all()[tier].__ray_call__.remote(lambda _: os.getpid()), timeout=30))


def proposed_by(tier: Tier, blocks: list[bytes]) -> int:
    """How many of the committed tokens came from this tier."""
    return sum(block.count(tier) for block in blocks)


def not_ready(runner: asyncio.Runner, tiers: Pipeline) -> set[str]:
    statuses = runner.run(tiers.status())
    assert [status.tier for status in statuses] == ["draft", "retrieval", "target"]
    assert all(status.address.startswith("127.0.0.1:") for status in statuses if status.ready)
    return {status.tier for status in statuses if not status.ready}


@pytest.mark.ci
def test_a_tier_that_is_dead_or_loads_is_said_not_to_be_ready(running: Running) -> None:
    """The status says so soon, and only of this tier."""
    runner, tiers = running
    assert not_ready(runner, tiers) == set()
    os.kill(pid_of(tiers, Tier.RETRIEVAL), signal.SIGKILL)
    seen, until = set[str](), time.monotonic() + 60
    while not_ready(runner, tiers) or not seen:
        seen |= not_ready(runner, tiers)
        assert time.monotonic() < until, "it does not come back"
        time.sleep(0.05)
    assert seen == {"retrieval"}


def wait_for_drafts(runner: asyncio.Runner, tiers: Pipeline, prompt: tuple[int, ...]) -> None:
    until = time.monotonic() + 60
    while not any(Tier.DRAFT in block for block in runner.run(decode(tiers, prompt))[1]):
        assert time.monotonic() < until, "the drafting tiers do not come back"


@pytest.mark.ci
def test_killed_and_hung_tiers_change_no_token(running: Running, held_out: HeldOut) -> None:
    prompt = held_out("inspect.py", 600)
    runner, tiers = running
    wait_for_drafts(runner, tiers, prompt)  # another test may have killed a tier
    expected, undisturbed = runner.run(decode(tiers, prompt))
    assert len(expected) == NUM_TOKENS
    assert {origin for block in undisturbed for origin in block} == {0, 1, 2}
    for tier in (Tier.DRAFT, Tier.RETRIEVAL):
        pid = pid_of(tiers, tier)
        tokens, origins = runner.run(decode(tiers, prompt, lambda pid=pid: os.kill(pid, signal.SIGKILL)))
        assert tokens == expected, f"{tier.name} killed"
        assert proposed_by(tier, origins) < proposed_by(tier, undisturbed), "some rounds went without it"
        wait_for_drafts(runner, tiers, prompt)
        assert pid_of(tiers, tier) != pid
        assert not_ready(runner, tiers) == set()
    for tier in (Tier.DRAFT, Tier.RETRIEVAL):
        pid = pid_of(tiers, tier)
        began = time.monotonic()
        try:
            tokens, _ = runner.run(decode(tiers, prompt, lambda pid=pid: os.kill(pid, signal.SIGSTOP)))
            elapsed = time.monotonic() - began
            asked = time.monotonic()
            assert not_ready(runner, tiers) == {tier.name.lower()}
            assert time.monotonic() - asked < 2 * STATUS_TIMEOUT_S, "the status of one tier holds up the others'"
        finally:
            os.kill(pid, signal.SIGCONT)
        assert tokens == expected, f"{tier.name} hung"
        assert elapsed > LINK_TIMEOUT_S / 2, "it did hang"
        wait_for_drafts(runner, tiers, prompt)
