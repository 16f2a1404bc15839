"""Completions that outlive their engines: the output is that of an undisturbed run, wherever an engine dies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from actors.target_server import EngineThread
from actors.wire import event_to_proto, request_from_proto
from deploy import journal
from deploy.client_request import ClientRequest
from deploy.errors import EngineCrashError, EngineLostError
from deploy.journal import MAX_DEATHS
from deploy.parts import Part
from deploy.service import ServedModel, Service
from triforce_core import resuming
from triforce_core._gen.triforce.v1 import generation_pb2 as gen
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.building.loading import load_local_engine
from triforce_core.config import Settings, load_settings
from triforce_core.engine.sequence import Output
from triforce_core.errors import DeadlineError, FingerprintError, UnavailableError
from triforce_core.messages import GREEDY, SamplingParams
from triforce_core.resuming import PROVEN_TOKENS
from triforce_core.sampling.guides import Guide

PROMPT = "def area(width, height):\n    return"
MAX_TOKENS = 10
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}, "b": {"type": "boolean"}}, "required": ["a", "b"]}
DRAWN = SamplingParams(temperature=0.8)
GONE = UnavailableError("the replica that served the request is gone")


@cache
def settings() -> Settings:
    return load_settings(dtype="float32", max_sequences=4, speculation={"tiers": "target"})


@cache
def model() -> ServedModel:
    return ServedModel.load(settings())


@pytest.fixture(autouse=True)
def _no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(journal, "MAX_DELAY_S", 0.01)


class Source:
    """The base of what stands in for the pipelines."""

    def __init__(self) -> None:
        self.requests: list[pb.DecodeRequest] = []

    async def status(self) -> dict[str, list[pb.TierStatus]]:
        return {}

    async def check(self) -> None:
        """A replica can serve."""


class Mortal(Source):
    """A real engine. The attempts die after these numbers of events with output, in order; those after them live."""

    def __init__(self, thread: EngineThread) -> None:
        super().__init__()
        self.thread = thread
        self.lives: list[int] = []

    async def decode(self, request: pb.DecodeRequest) -> AsyncGenerator[pb.DecodeEvent, None]:
        self.requests.append(request)
        life = self.lives.pop(0) if self.lives else None
        loop, events = asyncio.get_running_loop(), asyncio.Queue[pb.DecodeEvent | None]()

        def deliver(output: Output | None) -> None:
            event = None if output is None else event_to_proto(output, stats=request.stats_in_each)
            loop.call_soon_threadsafe(events.put_nowait, event)

        def entering(cached_tokens: int) -> None:
            entered = pb.DecodeEvent(entered=True, cached_tokens=cached_tokens)
            loop.call_soon_threadsafe(events.put_nowait, entered)

        sequence_id = self.thread.submit(request_from_proto(request, (0, 0)), deliver, entering)
        try:
            yield pb.DecodeEvent(fingerprint="fp_1")
            entered = await events.get()
            assert entered is not None, "the engine failed"
            yield entered
            while life is None or life > 0:
                event = await events.get()
                assert event is not None, "the engine failed"
                yield event
                if event.finish_reason:
                    return
                life = life and life - 1
            raise GONE
        finally:
            self.thread.cancel(sequence_id)


@pytest.fixture(scope="module")
def thread() -> Iterator[EngineThread]:
    running = EngineThread(load_local_engine(settings()))
    yield running
    running.stop()


def asked(**fields: Any) -> ClientRequest:
    return ClientRequest(**{"prompt": PROMPT, "sampling": DRAWN, "max_tokens": MAX_TOKENS, "seed": 7, **fields})


async def parts_of(source: Any, *requests: ClientRequest, service: Service | None = None) -> list[Part]:
    service = service or Service(settings(), model(), source)
    return [part async for part in service.complete(*requests)]


def whole(source: Any, *requests: ClientRequest) -> dict[int, dict[str, Any]]:
    """What the client of each completion has in the end."""
    found: dict[int, dict[str, Any]] = {}
    for part in asyncio.run(parts_of(source, *requests)):
        made = found.setdefault(part.index, {"text": "", "tokens": (), "logprobs": (), "prompt": (), "lengths": ()})
        made["text"] += part.piece.text
        made["tokens"] += part.piece.tokens
        made["lengths"] += part.piece.lengths
        made["logprobs"] += tuple(scored(each) for each in part.piece.logprobs)
        made["prompt"] += tuple(scored(each) for each in part.prompt_logprobs)
        if part.done:
            made["usage"] = (part.prompt_tokens, part.done.completion_tokens, part.done.finish_reason, part.seed)
    return found


def scored(each: Any) -> Any:
    """Logprobs to compare. They are equal up to rounding, which differs between passes over other numbers of tokens."""
    rounded = [None if each.logprob is None else pytest.approx(each.logprob, abs=1e-3)]
    return [*rounded, [token for token, _ in each.top]]


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": GREEDY},
    "drawn": {},
    "penalties": {"sampling": replace(DRAWN, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.9)},
    "min_tokens": {"sampling": replace(DRAWN, min_tokens=8, logit_bias=((0, 50.0),))},
    "stop strings": {"stop": ("width * height + wid", "\n\n", "zzz"), "sampling": GREEDY},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1, "echo": True},
    "JSON schema": {"guide": Guide("json_schema", json.dumps(SCHEMA)), "max_tokens": 24},
    "n": {"n": 2, "logprobs": 0},
}


@pytest.mark.parametrize("name", CASES)
def test_an_engine_that_dies_anywhere_changes_nothing(thread: EngineThread, name: str) -> None:
    source = Mortal(thread)
    undisturbed = whole(source, asked(**CASES[name]))
    attempts = len(source.requests)
    for life in range(MAX_TOKENS):
        source.lives = [life, life, life][: 1 if name != "n" else 3]
        assert whole(source, asked(**CASES[name])) == undisturbed, f"died after {life} events"
    assert len(source.requests) > attempts + MAX_TOKENS, "it died, and was asked to go on"
    assert any(request.resume_token_ids for request in source.requests)
    assert not thread.callbacks, "the engine holds nothing of dead attempts"


def test_a_stop_string_is_found_across_the_cut(thread: EngineThread) -> None:
    """It begins in tokens of the first attempt and ends in those of the second; nothing of it was sent meanwhile."""
    source = Mortal(thread)
    text = whole(source, asked(sampling=GREEDY))[0]["text"]
    stop = text[3:-3]
    assert len(stop) > 5
    undisturbed = whole(source, asked(sampling=GREEDY, stop=(stop,)))
    assert undisturbed[0]["text"] == text[: text.index(stop)]
    for life in range(1, MAX_TOKENS - 1):
        source.lives = [life]
        assert whole(source, asked(sampling=GREEDY, stop=(stop,))) == undisturbed


def test_lists_of_prompts_go_on_each_by_itself(thread: EngineThread) -> None:
    source = Mortal(thread)
    requests = [asked(prompt=prompt, n=2) for prompt in ("def f(", "class A", "import ")]
    undisturbed = whole(source, *requests)
    source.lives = [0, 3, 2, 5, 1, 4]
    assert whole(source, *requests) == undisturbed
    assert sorted(undisturbed) == [0, 1, 2, 3, 4, 5]


def test_a_request_that_goes_on_twice_and_its_figures(thread: EngineThread) -> None:
    source = Mortal(thread)
    source.lives = [20, 17]
    [*_, last] = asyncio.run(parts_of(source, asked(max_tokens=60)))
    assert [len(request.resume_token_ids) for request in source.requests] == [0, 20, 37]
    assert last.done
    assert last.done.completion_tokens == 60
    stats = last.done.stats
    assert stats.decoded == stats.tallies[0].rounds == 60 - 37 - 1, "of the last engine, without its prompt's pass"
    assert stats.plans == {"plain": stats.decoded}
    assert stats.prefill_s > 0


# -- deaths that count, and those that do not --------------------------------------------------------------------------


def token_event(token: int, *, last: bool = False) -> pb.DecodeEvent:
    stats = pb.DecodeStats(decoded=1, tallies=[pb.Tally(rounds=1)] * 3) if last else None
    finish = gen.FINISH_REASON_LENGTH if last else gen.FINISH_REASON_UNSPECIFIED
    return pb.DecodeEvent(token_ids=[token], origins=b"\0", stats=stats, finish_reason=finish)


REACHED, ENTERED = pb.DecodeEvent(fingerprint="fp_1"), pb.DecodeEvent(entered=True)


class Counting(Source):
    """A target whose n-th token is n + 5. Each attempt is `script`ed: the events before its tokens, how many of these
    it has, and the error that ends it; the last line holds for all later ones. So many as `together` end at the same
    time with their errors, as those in one pass of an engine do.
    """

    def __init__(self, *script: tuple[list[pb.DecodeEvent], int, Exception | None], together: int = 1) -> None:
        super().__init__()
        self.script, self.dying = list(script), asyncio.Barrier(together)
        self.running = self.most = 0  # attempts; most since the deaths
        self.unproven = self.most_unproven = 0  # attempts with fewer than PROVEN_TOKENS tokens; most since the deaths

    async def decode(self, request: pb.DecodeRequest) -> AsyncGenerator[pb.DecodeEvent, None]:
        self.requests.append(request)
        before, count, error = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        self.running, self.unproven, proven = self.running + 1, self.unproven + 1, False
        if error is None:
            self.most = max(self.most, self.running)
            self.most_unproven = max(self.most_unproven, self.unproven)
        try:
            for event in before:
                yield event
            first = len(request.resume_token_ids)
            for index in range(first, min(first + count, request.max_tokens)):
                await asyncio.sleep(0.001)
                if index - first + 1 == PROVEN_TOKENS:
                    self.unproven, proven = self.unproven - 1, True
                yield token_event(index + 5, last=index == request.max_tokens - 1)
            if error:
                await self.dying.wait()
                raise error
        finally:
            self.running -= 1
            self.unproven -= not proven


class Abandoned(Counting):
    """Its target dies, and later attempts wait for another one."""

    async def decode(self, request: pb.DecodeRequest) -> AsyncGenerator[pb.DecodeEvent, None]:
        if self.requests:
            await asyncio.sleep(60)
        async with aclosing(super().decode(request)) as events:
            async for event in events:
                yield event


def tokens_of(parts: list[Part]) -> list[int]:
    return [token for part in parts for token in part.piece.tokens]


def test_a_request_that_kills_every_engine_ends_with_an_error() -> None:
    """It ends although each attempt brings some tokens."""
    for count in (0, 1, PROVEN_TOKENS - 1):
        source = Counting(([REACHED, ENTERED], count, GONE))
        with pytest.raises(EngineCrashError, match=r"died 3 times while it decoded this request.*do not send it again"):
            asyncio.run(parts_of(source, asked(max_tokens=100)))
        assert len(source.requests) == MAX_DEATHS


def test_a_request_that_gets_on_is_no_suspect() -> None:
    source = Counting(([REACHED, ENTERED], PROVEN_TOKENS, GONE))
    assert tokens_of(asyncio.run(parts_of(source, asked(max_tokens=100)))) == [*range(5, 105)]
    assert len(source.requests) == 7


def test_a_request_that_only_waited_uses_up_no_attempt() -> None:
    """It only waited if no target had it, or if the target that had it was killed by other requests."""
    source = Counting(*[([], 0, GONE)] * 20, ([REACHED, ENTERED], 100, None))
    assert len(tokens_of(asyncio.run(parts_of(source, asked())))) == MAX_TOKENS
    assert len(source.requests) == 21
    source = Counting(([REACHED], 0, GONE), ([], 0, GONE), ([REACHED], 0, GONE), ([REACHED, ENTERED], 100, None))
    assert len(tokens_of(asyncio.run(parts_of(source, asked())))) == MAX_TOKENS


def test_an_engine_that_dies_too_fast_to_tell_convicts_whoever_is_alone() -> None:
    source = Counting(([REACHED], 0, GONE))
    with pytest.raises(EngineCrashError):
        asyncio.run(parts_of(source, asked()))
    assert len(source.requests) == 2 + MAX_DEATHS


def test_suspects_are_tried_one_at_a_time() -> None:
    """Eight requests were in two passes that died. Each runs alone until it is proven; then the next one comes."""

    async def run() -> None:
        source = Counting(*[([REACHED, ENTERED], 2, GONE)] * 16, ([REACHED, ENTERED], 100, None), together=8)
        service = Service(settings(), model(), source)
        runs = [parts_of(source, asked(seed=seed, max_tokens=60), service=service) for seed in range(8)]
        for answer in await asyncio.gather(*runs):
            assert tokens_of(answer) == [*range(5, 65)]
        assert (len(source.requests), source.most_unproven) == (24, 1)
        assert source.most > 1, "those that are proven run on beside the next"
        assert not service.turns.lock.locked()

    asyncio.run(run())


class Killer(Source):
    """One engine for all requests, as batched as can be: the request with the killing seed kills all that run."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.alive = seed, asyncio.Event()
        self.down = 0

    async def decode(self, request: pb.DecodeRequest) -> AsyncGenerator[pb.DecodeEvent, None]:
        self.requests.append(request)
        generation = self.down
        yield REACHED
        yield ENTERED
        first = len(request.resume_token_ids)
        for index in range(first, request.max_tokens):
            await asyncio.sleep(0.002)
            if request.seed == self.seed and index > first + 1:
                self.down += 1
            if self.down > generation:
                raise GONE
            yield token_event(index + 5, last=index == request.max_tokens - 1)


def test_a_killer_ends_and_the_others_finish() -> None:
    async def run() -> None:
        source = Killer(seed=3)
        service = Service(settings(), model(), source)
        runs = [parts_of(source, asked(seed=seed, max_tokens=60), service=service) for seed in range(8)]
        answers = await asyncio.wait_for(asyncio.gather(*runs, return_exceptions=True), 60)
        assert isinstance(answers.pop(3), EngineCrashError)
        for answer in answers:
            assert isinstance(answer, list), answer
            assert tokens_of(answer) == [*range(5, 65)]
        assert sum(request.seed == 3 for request in source.requests) == MAX_DEATHS
        assert (service.in_flight, service.turns.lock.locked()) == (0, False)

    asyncio.run(run())


def test_a_turn_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "TURN_S", 0.05)

    async def run() -> None:
        source = Counting(*[([REACHED, ENTERED], 1, GONE)] * 2, ([REACHED, ENTERED], 100, None))
        service = Service(settings(), model(), source)
        await service.turns.lock.acquire()  # somebody's prompt takes an hour
        service.turns.reached()
        assert len(tokens_of(await parts_of(source, asked(), service=service))) == MAX_TOKENS
        assert service.turns.lock.locked(), "the turn is still the other's"

    asyncio.run(run())


def test_all_wait_while_the_one_whose_turn_it_is_has_no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "TURN_S", 0.02)

    async def run() -> None:
        turns = journal.Turns()
        await turns.take()
        other = asyncio.create_task(turns.take())
        await asyncio.sleep(0.2)
        assert not other.done(), "the engine is being started"
        turns.reached()
        assert not await asyncio.wait_for(other, 10)
        turns.give_back()
        assert await asyncio.wait_for(turns.take(), 10)

    asyncio.run(run())


def test_closing_a_request_in_its_turn_gives_it_back() -> None:
    async def run() -> None:
        source = Counting(*[([REACHED, ENTERED], 1, GONE)] * 2, ([REACHED, ENTERED], 100, None))
        service = Service(settings(), model(), source)
        parts = service.complete(asked())
        for _ in range(3):
            await anext(parts)
        assert service.turns.lock.locked()
        await parts.aclose()
        assert (service.turns.lock.locked(), service.in_flight, source.running) == (False, 0, 0)

    asyncio.run(run())


# -- the end of patience -----------------------------------------------------------------------------------------------


def test_a_request_that_no_engine_takes_over_ends_with_its_time() -> None:
    source = Counting(([REACHED, ENTERED], 4, GONE), ([], 0, GONE))
    with pytest.raises(EngineLostError, match=r"the replica that served the request is gone.*ask again.*/status"):
        asyncio.run(parts_of(source, asked(timeout_s=0.3)))
    assert len(source.requests) > 5
    with pytest.raises(EngineLostError) as failed:
        asyncio.run(parts_of(Abandoned(([REACHED, ENTERED], 4, GONE)), asked(timeout_s=1.0)))
    assert str(failed.value).count("is gone, and none took over") == 1, "told once, for one death"
    silent = Counting(([REACHED, ENTERED], 0, None))
    silent.script[0] = ([REACHED, ENTERED], 0, DeadlineError("not done"))
    with pytest.raises(DeadlineError, match=r"not done within 0\.3 s"):
        asyncio.run(parts_of(silent, asked(timeout_s=0.3)))


def test_time_that_is_left_is_what_an_attempt_gets() -> None:
    source = Counting(([REACHED, ENTERED], 4, GONE), ([REACHED, ENTERED], 100, None))
    asyncio.run(parts_of(source, asked(timeout_s=50)))
    first, second = source.requests
    assert 49 < second.timeout_s < first.timeout_s <= 50


# -- the same fingerprint ----------------------------------------------------------------------------------------------

OTHER = FingerprintError("fingerprint: 'fp_1' is not what is served here, 'fp_2'")


def test_only_the_same_target_goes_on() -> None:
    source = Counting(([REACHED, ENTERED], 4, GONE), *[([], 0, OTHER)] * 9, ([REACHED, ENTERED], 100, None))
    parts = asyncio.run(parts_of(source, asked()))
    assert tokens_of(parts) == [*range(5, 5 + MAX_TOKENS)]
    assert [request.fingerprint for request in source.requests] == ["", *["fp_1"] * 10]
    assert {part.fingerprint for part in parts} == {"fp_1"}


def test_a_request_without_output_may_go_to_any_target() -> None:
    second = pb.DecodeEvent(fingerprint="fp_2")
    source = Counting(([REACHED, ENTERED], 0, GONE), ([second, ENTERED], 100, None))
    parts = asyncio.run(parts_of(source, asked()))
    assert [request.fingerprint for request in source.requests] == ["", ""]
    assert {part.fingerprint for part in parts} == {"fp_2"}


def test_an_output_that_nobody_continues_ends_with_a_named_error() -> None:
    source = Counting(([REACHED, ENTERED], 4, GONE), ([], 0, OTHER))
    with pytest.raises(FingerprintError, match=r"no replica continues this output.*ask anew"):
        asyncio.run(parts_of(source, asked(timeout_s=0.3)))


def test_a_claim_is_believed_for_a_short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "CLAIM_S", 0.1)
    source = Counting(([], 0, OTHER))
    with pytest.raises(FingerprintError):
        asyncio.run(asyncio.wait_for(parts_of(source, asked(resume=(5, 6), fingerprint="fp_9", timeout_s=300)), 60))
    assert {request.fingerprint for request in source.requests} == {"fp_9"}


def test_cached_tokens_are_those_that_the_first_engine_found() -> None:
    found, again = (pb.DecodeEvent(entered=True, cached_tokens=cached) for cached in (8, 16))
    source = Counting(([REACHED, found], 4, GONE), ([REACHED, again], 99, None))
    assert asyncio.run(parts_of(source, asked()))[-1].cached_tokens == 8


def test_a_prompt_that_comes_again_finds_its_tokens(thread: EngineThread) -> None:
    source, asks = Mortal(thread), asked(prompt="cached = [" + ", ".join(map(str, range(40))))
    found = [asyncio.run(parts_of(source, asks))[-1] for _ in range(2)]
    assert found[0].cached_tokens == 0
    assert found[0].prompt_tokens / 2 < found[1].cached_tokens < found[1].prompt_tokens


def test_statistics_come_at_the_end_unless_they_may_be_needed_before(thread: EngineThread) -> None:
    """A stop string may end the output at any event, and the figures so far are then those of the whole."""
    source = Mortal(thread)
    text = whole(source, asked(sampling=GREEDY))[0]["text"]
    for fields, in_each in (({}, False), ({"stop": (text[4:8],)}, True), ({"progress": True}, True)):
        parts = asyncio.run(parts_of(source, asked(sampling=GREEDY, **fields)))
        assert source.requests[-1].stats_in_each is in_each
        assert all(
            (part.so_far is not None and len(part.so_far.tallies) == 3) == ("progress" in fields) for part in parts[:-1]
        )
        assert parts[-1].done
        assert 0 < parts[-1].done.stats.decoded == parts[-1].done.stats.tallies[0].rounds
