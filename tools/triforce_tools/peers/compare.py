"""The same prompts to each server in turn: first text and milliseconds per token, as a client sees them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from openai import AsyncOpenAI, OpenAIError

from triforce_core.errors import TriForceError
from triforce_core.models.files import load_tokenizer, resolve
from triforce_tools.bench.prompts import held_out_tokens
from triforce_tools.peers.servers import PEERS, Modes, Running, Start, free_port, running
from triforce_tools.serving.doors import Answer, Ask, Question, http_door
from triforce_tools.serving.streams import together

Report = Callable[[str], None]
Row = dict[str, Any]
Prompts = dict[int, list[tuple[int, ...]]]  # by context, as many as there are streams at most
Place = tuple[str, int, float, int]  # mode, context, temperature, streams
# Seconds to the first text, and per token of one answer after that: milliseconds, and those of CPU by process.
Measured = tuple[Place, dict[str, Any]]
PLACE = ("mode", "context", "temperature", "streams")


@dataclass(frozen=True)
class Load:
    """What each server is asked: every combination of the values."""

    contexts: Sequence[int]  # tokens of each prompt
    temperatures: Sequence[float]
    streams: Sequence[int]  # answers at the same time, each to a prompt of its own
    output: int
    repeats: int  # turns: starts of each server

    def prompts(self, target: str) -> Prompts:
        tokenizer = load_tokenizer(target)
        many = range(max(self.streams))
        return {size: [tuple(held_out_tokens(tokenizer, size, n)) for n in many] for size in self.contexts}


def compare(
    names: Sequence[str],
    target: str,
    load: Load,
    prompts: Prompts,
    *,
    config: Path | None,
    dtype: str,
    environments: Path,
    report: Report,
    keep: Callable[[list[Row]], None],
) -> list[Row]:
    """A row for each server, mode and point, with the figures of each turn.

    Servers run one at a time, and every second turn is in reverse order. `keep` gets the rows after each server.
    """
    rows: dict[tuple[str, *Place], Row] = {}
    for turn in range(load.repeats):
        for name in names[:: -1 if turn % 2 else 1]:
            report(f"{turn + 1} of {load.repeats}: {name}")
            start = Start(
                Path(resolve(target, "target")),
                dtype,
                max(load.contexts) + load.output + 16,
                max(load.streams),
                free_port(),
                config,
            )
            with running(name, start, environments, environments / f"{name}.log") as server:
                for place, figures in asyncio.run(measured(name, server, load, prompts, turn)):
                    row = rows.setdefault((name, *place), {"peer": name, **dict(zip(PLACE, place, strict=True))})
                    for figure, value in figures.items():
                        row.setdefault(figure, []).append(value)
            keep([*rows.values()])
    return [*rows.values()]


async def measured(name: str, server: Running, load: Load, prompts: Prompts, turn: int) -> list[Measured]:
    try:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=3600) as client:
            ask = http_door(client, (await client.models.list()).data[0].id)
            return [each async for each in points(ask, server, PEERS[name].modes, load, prompts, turn)]
    except OpenAIError as error:
        raise TriForceError(f"{name}: {' '.join(str(error).split())[:300]}") from None


async def points(
    ask: Ask, server: Running, modes: Modes, load: Load, prompts: Prompts, turn: int
) -> AsyncIterator[Measured]:
    """First texts are those of prompts that nobody has read; then their KV is kept, where a server does that."""
    await ask(
        Question(prompts[min(prompts)][0], 8, cache_salt="first"), Answer()
    )  # what a first request alone waits for
    for context, streams in product(load.contexts, load.streams):
        salt = secrets.token_hex(8)
        questions = [Question(prompt, 1, cache_salt=salt) for prompt in prompts[context][:streams]]
        read = await together(ask, questions)
        first_text_s = median(answer.first_text_s for answer in read)
        for temperature, (mode, lookaheads) in product(load.temperatures, modes.items()):
            asked = [
                replace(each, max_tokens=load.output, temperature=temperature, lookaheads=lookaheads, seed=turn)
                for each in questions
            ]
            answers, before, after = await timed(ask, asked, server)
            tokens = answers[0].num_tokens - 1  # of one answer, as in `ms_per_token`
            cpu_ms = {name: 1e3 * (used - before.get(name, 0.0)) / tokens for name, used in after.items()}
            yield (
                (mode, context, temperature, streams),
                {
                    "first_text_s": first_text_s,
                    "ms_per_token": ms_per_token(answers),
                    "cpu_ms_per_token": {name: used for name, used in cpu_ms.items() if used > 0},
                },
            )


async def timed(
    ask: Ask, asked: list[Question], server: Running
) -> tuple[list[Answer], dict[str, float], dict[str, float]]:
    """The answers, and the server's CPU time when all had begun and when all had ended."""
    answers = [Answer() for _ in asked]
    running = asyncio.gather(*map(ask, asked, answers))
    while not (running.done() or all(answer.arrivals for answer in answers)):
        await asyncio.sleep(0.01)
    before = server.cpu_s()
    await running
    return answers, before, server.cpu_s()


def ms_per_token(answers: list[Answer]) -> float:
    """From the first chunk of any to the last of any, per token of one answer: so a server that answers one after
    another is not the faster for it.
    """
    began = min(answer.arrivals[0][0] for answer in answers)
    ended = max(answer.arrivals[-1][0] for answer in answers)
    return 1e3 * (ended - began) / (answers[0].num_tokens - 1)
