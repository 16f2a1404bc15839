"""The same prompts to each server in turn: first text and milliseconds per token, as a client sees them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import chain, product
from pathlib import Path
from statistics import median
from typing import Any

from openai import AsyncOpenAI, OpenAIError

from triforce_core.errors import TriForceError
from triforce_core.models.files import load_tokenizer, resolve
from triforce_tools.bench.prompts import HELD_OUT, held_out_tokens
from triforce_tools.peers.servers import PEERS, Modes, Running, Start, free_port, running
from triforce_tools.serving.doors import Answer, Ask, Question, http_door
from triforce_tools.serving.streams import together

Report = Callable[[str], None]
Row = dict[str, Any]
Prompts = dict[int, list[tuple[int, ...]]]  # by context, as many as there are streams at most
Place = tuple[str, int, float, int]  # mode, context, temperature, streams
# Seconds to the first text, and per token of one answer after that: milliseconds, and those of CPU by process; the
# memory of all processes, and of greedy answers what they say, as digests.
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
        """No prompt begins as another does, because some servers keep what they have read, whatever the salt."""
        tokenizer, many = load_tokenizer(target), max(self.streams)
        return {
            size: [tuple(held_out_tokens(tokenizer, size, (many * index + n) % len(HELD_OUT))) for n in range(many)]
            for index, size in enumerate(self.contexts)
        }


@dataclass
class Found:
    """The figures so far, of each turn: of each server, mode and point, and of each server's starts."""

    rows: list[Row] = field(default_factory=list)
    starts_s: dict[str, list[float]] = field(default_factory=dict)
    gaps: dict[str, str] = field(default_factory=dict)  # by server: why it cannot be compared

    def add(self, name: str, start_s: float, measured: list[Measured]) -> None:
        self.starts_s.setdefault(name, []).append(start_s)
        for place, figures in measured:
            about: Row = {"peer": name, **dict(zip(PLACE, place, strict=True))}
            row = next((row for row in self.rows if about.items() <= row.items()), about)
            if row is about:
                self.rows.append(row)
            for figure, value in figures.items():
                row.setdefault(figure, []).append(value)

    def same_texts(self) -> dict[str, list[int]]:
        """By server and mode: how many of its greedy answers say what those of the first do, and of how many."""
        greedy, same = [row for row in self.rows if "says" in row], dict[str, list[int]]()
        for row in greedy:
            first = next(each for each in greedy if all(each[name] == row[name] for name in PLACE[1:]))
            pairs = list(zip(chain(*row["says"]), chain(*first["says"]), strict=False))
            counts = same.setdefault(f"{row['peer']}, {row['mode']}", [0, 0])
            counts[0] += sum(one == other for one, other in pairs)
            counts[1] += len(pairs)
        return same


def compare(
    names: Sequence[str],
    models: tuple[str, str | None],
    load: Load,
    prompts: Prompts,
    found: Found,
    *,
    config: Path | None,
    dtype: str,
    environments: Path,
    report: Report,
    keep: Callable[[], None],
) -> None:
    """Add to `found` what each server does in each turn that is not there yet. `models`: the target and its drafter.

    Servers run one at a time, and every second turn is in reverse order. `keep` is called after each server. One that
    cannot start, or ends, is a gap.
    """
    target, drafter = models
    tokenizer = load_tokenizer(target)
    for turn in range(load.repeats):
        for name in names[:: -1 if turn % 2 else 1]:
            if name in found.gaps or turn < len(found.starts_s.get(name, [])):
                continue
            report(f"{turn + 1} of {load.repeats}: {name}")
            start = Start(
                Path(resolve(target, "target")),
                Path(resolve(drafter, "drafter")) if drafter else None,
                dtype,
                max(load.contexts) + load.output + 16,
                max(load.streams),
                free_port(),
                config,
                environments,
            )
            try:
                with running(name, start, environments, environments / f"{name}.log") as server:
                    found.add(name, server.start_s, asyncio.run(measured(name, server, load, prompts, turn, tokenizer)))
            except TriForceError as error:
                found.gaps[name] = str(error)
                report(str(error))
            keep()


async def measured(
    name: str, server: Running, load: Load, prompts: Prompts, turn: int, tokenizer: Any
) -> list[Measured]:
    def digest(answer: Answer) -> str:
        ids = answer.text.split() if PEERS[name].tells_ids else []
        text = tokenizer.decode([int(each) for each in ids]) if ids else answer.text
        return sha256(text.encode()).hexdigest()[:8]

    try:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=3600) as client:
            ask = http_door(client, (await client.models.list()).data[0].id)
            return [each async for each in points(ask, server, PEERS[name].modes, load, prompts, turn, digest)]
    except OpenAIError as error:
        raise TriForceError(f"{name}: {' '.join(str(error).split())[:300]}") from None


async def points(
    ask: Ask,
    server: Running,
    modes: Modes,
    load: Load,
    prompts: Prompts,
    turn: int,
    digest: Callable[[Answer], str],
) -> AsyncIterator[Measured]:
    """First texts are those of prompts that nobody has read; then their KV is kept, where a server does that."""
    # What a first request alone waits for; backwards, because some servers keep what they have read.
    await ask(Question(prompts[min(prompts)][0][::-1], 8, cache_salt="first"), Answer())
    for context, streams in product(load.contexts, load.streams):
        salt = secrets.token_hex(8)
        # More tokens than one, because the text of one may be half a character, of which nothing is told.
        questions = [Question(prompt, 4, cache_salt=salt) for prompt in prompts[context][:streams]]
        read = whole(await together(ask, questions), 4)
        first_text_s = median(answer.first_text_s for answer in read)
        for temperature, (mode, lookaheads) in product(load.temperatures, modes.items()):
            asked = [
                replace(each, max_tokens=load.output, temperature=temperature, lookaheads=lookaheads, seed=turn)
                for each in questions
            ]
            answers, before, after = await timed(ask, asked, server)
            whole(answers, load.output)
            tokens = answers[0].num_tokens - 1  # of one answer, as in `ms_per_token`
            cpu_ms = {name: 1e3 * (used - before.get(name, 0.0)) / tokens for name, used in after.items()}
            figures: dict[str, Any] = {
                "first_text_s": first_text_s,
                "ms_per_token": ms_per_token(answers),
                "cpu_ms_per_token": {name: used for name, used in cpu_ms.items() if used > 0},
                "memory_gb": server.memory_gb(),
            }
            says = {} if temperature else {"says": [digest(answer) for answer in answers]}
            yield (mode, context, temperature, streams), figures | says


def whole(answers: list[Answer], tokens: int) -> list[Answer]:
    """The answers. Raises `TriForceError` unless each has so many tokens, and text."""
    for answer in answers:
        if answer.num_tokens != tokens or not answer.arrivals:
            said = f"{answer.num_tokens} tokens, in {len(answer.arrivals)} parts"
            raise TriForceError(f"an answer of {tokens} tokens was asked for: got {said}")
    return answers


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
