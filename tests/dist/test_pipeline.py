"""Three real actors against the same chain in this process: the same tokens, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

import pytest

from actors.wire import sampling_from_proto, sampling_to_proto
from tests.conftest import HeldOut
from tests.dist.conftest import StartPipeline
from tests.dist.decoding import Tiers
from triforce_core._gen.triforce.v1 import generation_pb2 as gen
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.building.assembly import local_engine
from triforce_core.config import Settings, load_settings
from triforce_core.engine.engine import Engine, run_to_end
from triforce_core.engine.sequence import Request
from triforce_core.errors import ContextLengthError, InvalidValueError, UnavailableError
from triforce_core.messages import SamplingParams

MAX_SEQUENCES = 3
HELD_OUT_FILES = ("inspect.py", "turtle.py", "tarfile.py")
# Small enough that snapshots select, are refreshed in mid-stream, and prompts come in several chunks.
SETTINGS: Settings = load_settings(
    dtype="float32",
    max_sequences=MAX_SEQUENCES,
    retrieval={"budget": 256, "chunk": 8, "refresh_every": 24},
    target={"prefill_chunk": 500, "kv_pool_tokens": 9000},
)


@pytest.fixture(scope="module")
def tiers(start_pipeline: StartPipeline) -> Iterator[Tiers]:
    with start_pipeline(SETTINGS) as (runner, pipeline):
        yield Tiers(pipeline, runner.run)


@pytest.fixture(autouse=True)
def nothing_left_running(tiers: Tiers) -> Iterator[None]:
    yield
    tiers.wait_idle()
    tiers.run(tiers.pipeline.check(5.0))


@pytest.fixture(scope="module")
def engine() -> Engine:
    """The same chain in this process."""
    from triforce_core.models.load import load_model

    target, drafter = (load_model("demo", role, SETTINGS.dtype, SETTINGS.device) for role in ("target", "drafter"))
    return local_engine(target, drafter, SETTINGS)


def request(
    prompt: tuple[int, ...],
    *,
    max_tokens: int = 60,
    seed: int = 0,
    temperature: float = 0.8,
    lookaheads: tuple[int, int] = (8, 3),
    resume: tuple[int, ...] = (),
) -> pb.DecodeRequest:
    return pb.DecodeRequest(
        prompt_token_ids=prompt,
        resume_token_ids=resume,
        sampling=sampling_to_proto(SamplingParams(temperature, top_p=0.95 if seed % 2 else 1.0)),
        seed=seed,
        max_tokens=max_tokens,
        lookaheads=gen.Lookaheads(values=lookaheads),
    )


def in_one_process(engine: Engine, message: pb.DecodeRequest) -> list[int]:
    """The request's tokens without speculation and without actors."""
    plain = Request(
        tuple(message.prompt_token_ids), message.max_tokens, sampling_from_proto(message.sampling), message.seed, (0, 0)
    )
    return [token for output in run_to_end(engine, [plain]) for token in output.tokens]


@pytest.mark.parametrize("lookaheads", [(0, 0), (8, 0), (8, 3), (16, 4), (0, 5), (1, 1)])
@pytest.mark.parametrize(("seed", "temperature", "length"), [(0, 0.0, 1500), (1, 0.6, 700), (2, 1.0, 40)])
def test_three_actors_give_the_tokens_of_one_process(
    tiers: Tiers,
    engine: Engine,
    held_out: HeldOut,
    lookaheads: tuple[int, int],
    seed: int,
    temperature: float,
    length: int,
) -> None:
    asked = request(held_out("inspect.py", length), seed=seed, temperature=temperature, lookaheads=lookaheads)
    [decoded] = tiers.decode(asked)
    assert decoded.tokens == in_one_process(engine, asked)
    assert len(decoded.origins) == len(decoded.tokens) == 60
    assert decoded.finish_reason == gen.FINISH_REASON_LENGTH
    [last] = decoded.stats
    asked.stats_in_each = True
    [decoded] = tiers.decode(asked)
    assert len(decoded.stats) > 1
    assert [stats.decoded for stats in decoded.stats] == sorted(stats.decoded for stats in decoded.stats)
    assert last.decoded == 59, "the first token is the prefill's"
    assert (last.acceptance["retrieval"] is not None) == (lookaheads[0] > 0)
    assert (last.acceptance["draft"] is not None) == (lookaheads[1] > 0)
    if lookaheads == (8, 3):
        assert last.snapshots > 1, "refreshed in mid-stream"
        assert set(decoded.origins) >= {0, 1}
        assert last.tokens_per_round is not None
        assert last.tokens_per_round > 2


def test_requests_decoded_together_are_decoded_as_alone(tiers: Tiers, engine: Engine, held_out: HeldOut) -> None:
    """There are more requests than fit at once, of unequal lengths, with mixed lookaheads."""
    asked = [
        request(held_out("turtle.py", 30 + 350 * n), seed=n, temperature=0.3 * n, lookaheads=lookaheads)
        for n, lookaheads in enumerate([(8, 3), (0, 0), (4, 2), (8, 0), (2, 6)])
    ]
    assert len(asked) > MAX_SEQUENCES
    together = tiers.decode(*asked)
    for message, decoded in zip(asked, together, strict=True):
        assert decoded.tokens == in_one_process(engine, message)


def test_the_tiers_are_three_processes_and_their_links_carry_the_blocks(tiers: Tiers, held_out: HeldOut) -> None:
    import ray

    pids = ray.get([actor.__ray_call__.remote(lambda _: os.getpid()) for actor in tiers.pipeline.actors.all().values()])
    assert len({*pids, os.getpid()}) == 4
    before = tiers.links()
    assert before.keys() == {"target>retrieval", "retrieval>draft"}
    [decoded] = tiers.decode(request(held_out("inspect.py", 600)))
    after = tiers.links()
    rounds = decoded.stats[-1].tallies[0].rounds
    for name, least in (("target>retrieval", rounds), ("retrieval>draft", rounds)):
        grown = {
            f.name: getattr(after[name], f.name) - getattr(before[name], f.name)
            for f, _ in after[name].ListFields()[1:]
        }
        assert grown["proposals"] >= least
        assert grown["work_items"] >= least
        assert min(grown.values()) > 0, grown
    upper = after["target>retrieval"].proposed_tokens - before["target>retrieval"].proposed_tokens
    assert upper >= decoded.origins.count(0) + decoded.origins.count(1)
    [plain] = tiers.decode(request(held_out("inspect.py", 600), lookaheads=(0, 0)))
    assert plain.tokens == decoded.tokens
    assert tiers.links()["target>retrieval"].work_items == after["target>retrieval"].work_items


@pytest.mark.parametrize("after_events", [0, 1, 3])
def test_a_request_that_is_closed_frees_every_tier(tiers: Tiers, held_out: HeldOut, after_events: int) -> None:
    asked = request(held_out("inspect.py", 3000), max_tokens=5000)

    async def some() -> None:
        events: AsyncGenerator[pb.DecodeEvent, None]
        async with aclosing(tiers.pipeline.decode(asked)) as events:
            if not after_events:  # while the prompt is being read
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(events), 0.2)
            for _ in range(after_events):
                await anext(events)
            while after_events and set((await live()).values()) != {1}:  # the first token asks no other tier
                await asyncio.sleep(0.02)

    async def live() -> dict[str, int]:
        return {status.tier: status.live_sequences for status in await tiers.pipeline.status()}

    tiers.run(asyncio.wait_for(some(), 30))
    tiers.wait_idle()


def test_what_was_received_can_be_resumed(tiers: Tiers, held_out: HeldOut) -> None:
    prompt = held_out("inspect.py", 900)
    [whole] = tiers.decode(request(prompt, seed=5))
    for received in (1, 23, 59):
        [rest] = tiers.decode(request(prompt, seed=5, resume=tuple(whole.tokens[:received])))
        assert rest.tokens == whole.tokens[received:]


def test_resuming_what_was_received_whole_ends_at_once(tiers: Tiers, held_out: HeldOut) -> None:
    """A replica may die between its last token and its last word."""
    prompt = held_out("inspect.py", 300)
    [whole] = tiers.decode(request(prompt, max_tokens=20))
    [rest] = tiers.decode(request(prompt, max_tokens=20, resume=tuple(whole.tokens)))
    assert rest.tokens == []
    assert rest.finish_reason == gen.FINISH_REASON_LENGTH
    ending = request(prompt, max_tokens=20, resume=tuple(whole.tokens[:5]))
    ending.stop_token_ids.append(whole.tokens[4])
    [rest] = tiers.decode(ending)
    assert rest.tokens == []
    assert rest.finish_reason == gen.FINISH_REASON_STOP


def test_messages_are_passed_on_unparsed(tiers: Tiers) -> None:
    async def relayed(packed: bytes) -> list[bytes]:
        async with tiers.pipeline.reached(packed) as (target, request):
            return [event async for event in target.decode(request)]

    asked = request((5, 6, 7), max_tokens=8)
    events = [pb.DecodeEvent.FromString(event) for event in tiers.run(relayed(asked.SerializeToString()))]
    assert [token for event in events for token in event.token_ids] == tiers.decode(asked)[0].tokens
    assert events[-1].finish_reason == gen.FINISH_REASON_LENGTH
    with pytest.raises(UnavailableError):  # only the target tries to read the message, and it cannot
        tiers.run(relayed(b"\xff"))


BAD: list[tuple[pb.DecodeRequest, type[Exception], str]] = [
    (request(()), InvalidValueError, "prompt: '' must hold at least one token"),
    (request((4096,)), InvalidValueError, "prompt: 4096 is not a token id: must be at least 0 and below 4096"),
    (request((1,), resume=(5000,)), InvalidValueError, "resume_token_ids: 5000 is not a token id"),
    (request((1,), max_tokens=0), InvalidValueError, "max_tokens: 0 must be at least 1"),
    (
        request((1,), max_tokens=2, resume=(1, 2, 3)),
        InvalidValueError,
        "resume_token_ids: 3 must be at most max_tokens",
    ),
    (request((1,), lookaheads=(65, 0)), InvalidValueError, "lookaheads: (65, 0) must each be at most 64"),
    (request((1,) * 16384, max_tokens=1), ContextLengthError, "must fit the context of 16384 tokens"),
    (
        pb.DecodeRequest(prompt_token_ids=[1], max_tokens=1),
        InvalidValueError,
        "sampling.temperature: None must be present",
    ),
]


@pytest.mark.parametrize(("asked", "error", "words"), BAD, ids=[words[:30] for _, _, words in BAD])
def test_a_bad_request_is_refused_by_name(
    tiers: Tiers, asked: pb.DecodeRequest, error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as refused:
        tiers.decode(asked)
    assert type(refused.value) is error
    assert words in str(refused.value)
    assert len(tiers.decode(request((1, 2, 3), max_tokens=4))[0].tokens) == 4


@pytest.mark.ci
def test_a_full_pool_preempts_and_changes_no_token(tiers: Tiers, held_out: HeldOut) -> None:
    """Three requests go live, because there is room for their present lengths. Then they outgrow the pool. One is taken
    back at every tier, and goes on when there is room for all of it.
    """
    asked = [request(held_out(name, 2700), max_tokens=450, seed=n) for n, name in enumerate(HELD_OUT_FILES)]
    alone = [tiers.decode(each)[0] for each in asked]
    together = tiers.decode(*asked)
    assert [d.tokens for d in together] == [d.tokens for d in alone]
    assert [d.stats[-1].preempted for d in alone] == [0, 0, 0]
    assert sum(d.stats[-1].preempted for d in together) >= 1
    for each in together:
        assert len(each.origins) == len(each.tokens) == 450
        assert each.stats[-1].tallies[0].accepted == sum(origin < 2 for origin in each.origins)
