"""The whole of `triforce bench serve`: asks the server for its model and its tokens per word, and sends the load."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, aclosing
from typing import Any

from triforce_core.errors import UnavailableError
from triforce_core.models.cpu import cpu_summary
from triforce_tools.load.answers import Client, FailedError, Question, Record
from triforce_tools.load.measures import Goals, figures_of
from triforce_tools.load.prompts import DOCUMENT_SHARE, Prompts, words_of
from triforce_tools.load.sender import Asking, Sender
from triforce_tools.load.workload import Load

MEASURED_WORDS = 256  # of the request that finds out how many tokens a word is
FIRST_ANSWER_S = 10.0  # a server that does not name its models within this time is not there


async def bench_serve(
    client: Client,
    load: Load,
    goals: Goals,
    *,
    model: str | None,
    temperature: float,
    timeout_s: float,
    progress: AbstractContextManager[Callable[[Record], None]],
) -> tuple[dict[str, Any], list[Record]]:
    """Send the load to the client's server; its figures, and the records of its requests. `progress` is entered when
    the load starts, and is told each record.

    Raises `UnavailableError` if no server answers, or if it does not answer one short request before the load.
    """
    chosen = await chosen_model(client, model)
    prompts = Prompts(load.seed, await tokens_per_word(client, chosen, timeout_s), run=secrets.token_hex(8))
    load_before = os.getloadavg()[0]
    asking = Asking(chosen, prompts, temperature, load.seed)
    with progress as watch:
        records = await Sender(client, asking, timeout_s=timeout_s, watch=watch).send(load)
    conditions = {
        "model": chosen,
        "load": settings_of(load),
        "temperature": temperature,
        "tokens_per_word": round(prompts.tokens_per_word, 3),
        "cpu": cpu_summary(),
        "cores": os.cpu_count(),
        "load_average": [load_before, os.getloadavg()[0]],
    }
    return conditions | figures_of(records, goals), records


async def chosen_model(client: Client, model: str | None) -> str:
    """The given model, or the server's first."""
    try:
        async with asyncio.timeout(FIRST_ANSWER_S):
            names = await client.models()
    except TimeoutError:
        raise UnavailableError(f"{client.address} did not name its models within {FIRST_ANSWER_S:g} s") from None
    except FailedError as error:
        raise UnavailableError(f"{client.address} did not name its models: {error.kind}: {error}") from None
    if model is None and not names:
        raise UnavailableError(f"{client.address} has no model")
    return model or names[0]


async def tokens_per_word(client: Client, model: str, timeout_s: float) -> float:
    """How many of the server's tokens a word of our prompts is, by its usage of one request; 1 if it states none."""
    question = Question(model, words_of("measured", MEASURED_WORDS), max_tokens=1, temperature=0.0, seed=0)
    usage = None
    try:
        async with asyncio.timeout(timeout_s), aclosing(client.answer(question)) as pieces:
            async for piece in pieces:
                usage = piece.usage or usage
    except TimeoutError:
        raise UnavailableError(f"{client.address} did not answer one short request within {timeout_s:g} s") from None
    except FailedError as error:
        raise UnavailableError(f"{client.address} did not answer one short request: {error.kind}: {error}") from None
    return usage.prompt_tokens / MEASURED_WORDS if usage and usage.prompt_tokens else 1.0


def settings_of(load: Load) -> dict[str, Any]:
    """The load's settings, without those that do not apply."""
    settings: dict[str, Any] = {
        "rate": load.rate,
        "concurrency": load.concurrency,
        "requests": load.requests,
        "duration_s": load.duration_s,
        "seed": load.seed,
    }
    if load.trace is None:
        settings |= {"input": str(load.input), "output": str(load.output)}
    else:
        settings |= {"traced_requests": len(load.trace)}
    if load.shared:
        settings |= {"shared": load.shared, "documents": load.documents, "document_share": DOCUMENT_SHARE}
    return {name: value for name, value in settings.items() if value is not None}
