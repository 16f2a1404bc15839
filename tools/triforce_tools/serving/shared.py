"""What eight questions on one document cost, compared with the same questions on eight documents.

Documents that nobody shares are the same text under salts of their own: equally long, and equally hard to draft.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from statistics import mean, median

from triforce_tools.serving.doors import Answer, Question, Server
from triforce_tools.serving.streams import Row, together

QUESTIONS = 8
QUESTION_TOKENS = 32  # that follow the document, different in each question
POLL_S = 0.1  # between two readings of the KV in use


async def measure_shared(
    server: Server, *, context: int, output: int, temperature: float, report: Callable[[str], None]
) -> list[Row]:
    """A row for one document and a row for eight. The server must have eight places, and KV for eight documents."""
    document = await server.held_out_tokens(context)
    prompts = [document + await server.held_out_tokens(QUESTION_TOKENS, index + 1) for index in range(QUESTIONS)]
    run, ask = secrets.token_hex(8), server.doors["grpc"]

    async def answers(salts: list[str], lookaheads: tuple[int, int] | None) -> list[Answer]:
        asked = zip(prompts, salts, strict=True)
        return await together(
            ask, [Question(prompt, output, temperature, lookaheads, f"{run} {salt}") for prompt, salt in asked]
        )

    rows: list[Row] = []
    expected: list[list[int]] = []
    for documents, salts in ((1, ["one"] * QUESTIONS), (QUESTIONS, [f"own {index}" for index in range(QUESTIONS)])):
        report(f"documents: {documents}; the first question alone, then all together")
        first, done = Answer(), asyncio.Event()
        await ask(Question(prompts[0], output, temperature, None, f"{run} {salts[0]}"), first)
        most_kv = asyncio.create_task(most_kv_tokens(server, done))
        read = await answers(salts, server.lookaheads)
        report(f"documents: {documents}; all read: together, plain, and then as the server drafts")
        plain, drafted = await answers(salts, (0, 0)), await answers(salts, None)
        done.set()
        given = [answer.tokens for answer in (*read, *plain, *drafted)]
        expected = expected or given[:QUESTIONS]
        accepted = [answer.acceptance for answer in read if answer.acceptance is not None]
        rows.append(
            {
                "documents": documents,
                "first_text_alone_s": round(first.first_text_s, 3),
                "first_text_together_s": round(median(answer.first_text_s for answer in read[1:]), 3),
                "first_text_when_read_s": round(median(answer.first_text_s for answer in plain), 3),
                "most_kv_tokens": await most_kv,
                "acceptance": round(mean(accepted), 3) if accepted else None,
                "plain_tokens_per_s": round(tokens_per_s(plain), 1),
                "drafted_tokens_per_s": round(tokens_per_s(drafted), 1),
                "same_answers": round(mean(one == other for one, other in zip(given, expected * 3, strict=True)), 3),
            }
        )
    return rows


async def most_kv_tokens(server: Server, done: asyncio.Event) -> int:
    """The most tokens of KV that the target had in use at once, until `done`."""
    most = 0
    while not done.is_set():
        tiers = (await server.status())["tiers"]
        most = max(most, *(tier["kv_tokens"] for tier in tiers if tier["tier"] == "target"))
        await asyncio.sleep(POLL_S)
    return most


def tokens_per_s(answers: list[Answer]) -> float:
    """Of all answers together, from when the last of them began."""
    begin = max(answer.arrivals[0][0] for answer in answers)
    end = max(answer.arrivals[-1][0] for answer in answers)
    return sum(count for answer in answers for at_s, count in answer.arrivals if at_s > begin) / (end - begin)
