"""Sends a load and records the answers. What the sender itself does must not change what it measures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

from triforce_core.client.results import Usage
from triforce_tools.load.answers import Client, FailedError, Question, Record
from triforce_tools.load.prompts import Prompts
from triforce_tools.load.workload import Load, PlannedRequest


@dataclass(frozen=True, slots=True)
class Asking:
    """How each planned request becomes a question."""

    model: str
    prompts: Prompts
    temperature: float
    seed: int

    def question(self, planned: PlannedRequest) -> Question:
        return Question(
            model=self.model,
            prompt=self.prompts.text(planned),
            max_tokens=planned.output_tokens,
            temperature=self.temperature,
            seed=self.seed + planned.index,
            priority=planned.priority,
        )


class Sender:
    """Sends one load to one server. `watch` gets each record when the request has ended."""

    def __init__(self, client: Client, asking: Asking, *, timeout_s: float, watch: Callable[[Record], None]) -> None:
        self.client, self.asking, self.timeout_s, self.watch = client, asking, timeout_s, watch

    async def send(self, load: Load) -> list[Record]:
        """The records of all requests, in the order in which they ended."""
        self.records: list[Record] = []
        self._start_s = time.perf_counter()
        if load.concurrency is None:
            await self._at_their_times(load)
        else:
            await self._by_users(load, load.concurrency)
        return self.records

    def _now_s(self) -> float:
        return time.perf_counter() - self._start_s

    async def _at_their_times(self, load: Load) -> None:
        """Send each request when it is due, however slow the answers to earlier ones are."""
        async with asyncio.TaskGroup() as sent:
            for planned in load.planned():
                assert planned.arrival_s is not None
                question = self.asking.question(planned)  # takes time, so it is made before the request is due
                await asyncio.sleep(planned.arrival_s - self._now_s())
                sent.create_task(self._ask(question, planned.arrival_s))

    async def _by_users(self, load: Load, users: int) -> None:
        """Users take the next request as soon as they have the answer to their last."""
        coming = load.planned()

        async def user() -> None:
            while load.duration_s is None or self._now_s() < load.duration_s:
                if (planned := next(coming, None)) is None:
                    return
                question = self.asking.question(planned)
                await self._ask(question, self._now_s())

        async with asyncio.TaskGroup() as working:
            for _ in range(users):
                working.create_task(user())

    async def _ask(self, question: Question, due_s: float) -> None:
        sent_s = self._now_s()
        text_at_s: list[float] = []
        usage: Usage | None = None
        failure: FailedError | None = None
        try:
            async with asyncio.timeout(self.timeout_s), aclosing(self.client.answer(question)) as pieces:
                async for piece in pieces:
                    if piece.text:
                        text_at_s.append(self._now_s())
                    usage = piece.usage or usage
        except TimeoutError:
            failure = FailedError("timeout", f"no whole answer within {self.timeout_s:g} s")
        except FailedError as error:
            failure = error
        record = Record(due_s, sent_s, tuple(text_at_s), self._now_s(), usage, failure)
        self.records.append(record)
        self.watch(record)
