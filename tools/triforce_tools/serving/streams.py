"""A token's time at each door of a server, and how long a stream waits while others load the server."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from statistics import mean, median
from typing import Any

from triforce_core.errors import require
from triforce_tools.serving.doors import Answer, Ask, Question, Server

# One MB. It is longer than most contexts, so that the server refuses it; a model with room for it reads it as a prompt.
BODY = "a " * 500_000
BODY_EVERY_S = 0.5  # after the answer to the last
HEAD_START_S = 1.0  # for which the streams run alone before long prompts arrive
LONG_PROMPTS = 2
BESIDE = ("bodies", "long-prompts")
SHORT_TOKENS, SHORT_OUTPUT = 200, 16  # of the prompt that arrives with the long ones, and of the answers to all three


@dataclass(frozen=True)
class Streams:
    """`count` streams at the same time, each with a prompt of its own."""

    context: int  # tokens of each prompt, and of the long prompts beside them
    output: int
    count: int
    temperature: float


@dataclass(frozen=True)
class Turn:
    """One door in one mode: the streams' mean time per token, and their longest gap."""

    ms_per_token: float
    longest_gap_ms: float  # from the moment when prompts are sent beside the streams, if any are
    short_prompt_ms: float | None  # to the first text of the short prompt beside the streams


Way = tuple[str, str, str | None]  # door, mode, and what is beside the streams
Row = dict[str, Any]
Prompt = tuple[int, ...]


async def together(ask: Ask, questions: list[Question]) -> list[Answer]:
    answers = [Answer() for _ in questions]
    await asyncio.gather(*map(ask, questions, answers))
    return answers


async def measure_streams(
    server: Server, load: Streams, *, beside: str | None, repeats: int, report: Callable[[str], None]
) -> list[Row]:
    """A row for each door, plain and speculating, alone and beside a load: medians over turns. Every second turn is in
    reverse order.
    """
    salt = secrets.token_hex(8)  # so that no run finds the KV of another
    prompts = [await server.held_out_tokens(load.context, index) for index in range(load.count)]
    questions = [Question(prompt, load.output, load.temperature, cache_salt=salt) for prompt in prompts]
    sizes = [*[load.context] * LONG_PROMPTS, SHORT_TOKENS] if beside == "long-prompts" else []
    others = [await server.held_out_tokens(size, load.count + index) for index, size in enumerate(sizes)]
    modes = {"plain": (0, 0)} | ({"speculating": server.lookaheads} if any(server.lookaheads) else {})
    ways: list[Way] = list(product(server.doors, modes, [None, beside] if beside else [None]))
    turns: dict[Way, list[Turn]] = {way: [] for way in ways}
    report("reading the prompts")
    for ask in server.doors.values():  # where the server has keys, HTTP and gRPC do not share the engine's KV
        await together(ask, [replace(question, max_tokens=1) for question in questions])
    for turn in range(repeats):
        for way in ways[:: -1 if turn % 2 else 1]:
            door, mode, what = way
            report(f"{turn + 1} of {repeats}: {door}, {mode}" + (f", beside {what}" if what else ""))
            asked = [replace(question, lookaheads=modes[mode], seed=turn) for question in questions]
            turns[way].append(await one_turn(server, server.doors[door], asked, what, others, load.output))
    return [row_of(way, turns[way]) for way in ways]


async def one_turn(
    server: Server, ask: Ask, questions: list[Question], beside: str | None, others: list[Prompt], output: int
) -> Turn:
    streams, came = [Answer() for _ in questions], list[Answer]()
    running = asyncio.gather(*map(ask, questions, streams))
    if beside == "bodies":
        while not running.done():
            await server.refuses(BODY)
            await asyncio.sleep(BODY_EVERY_S)
    elif beside == "long-prompts":
        came, _ = await asyncio.gather(ask_beside(ask, streams, others), running)
    await running
    begun_s = max((other.arrivals[0][0] for other in came), default=0.0)
    rule = "is too short: a stream ended before the prompts beside it had their first text"
    require(all(stream.arrivals[-1][0] > begun_s for stream in streams), "output", output, rule)
    require(all(len(stream.arrivals) > 2 for stream in streams), "output", output, "is too short to be timed")
    came_s = min((other.sent_s for other in came), default=0.0)
    return Turn(
        mean(stream.ms_per_token for stream in streams),
        max(stream.longest_gap_ms(came_s) for stream in streams),
        1e3 * came[-1].first_text_s if came else None,
    )


async def ask_beside(ask: Ask, streams: list[Answer], prompts: list[Prompt]) -> list[Answer]:
    """The answers to long prompts and then a short one, asked while the streams run."""
    await asyncio.gather(*(stream.begun.wait() for stream in streams))
    await asyncio.sleep(HEAD_START_S)
    salt = secrets.token_hex(8)  # so that they are read in every turn
    return await together(ask, [Question(prompt, SHORT_OUTPUT, cache_salt=salt) for prompt in prompts])


def row_of(way: Way, turns: list[Turn]) -> Row:
    short_ms = [turn.short_prompt_ms for turn in turns if turn.short_prompt_ms is not None]
    return {
        "door": way[0],
        "mode": way[1],
        "beside": way[2],
        "ms_per_token": round(median(turn.ms_per_token for turn in turns), 2),
        "longest_gap_ms": round(median(turn.longest_gap_ms for turn in turns)),
        "short_prompt_first_text_ms": round(median(short_ms)) if short_ms else None,
    }
