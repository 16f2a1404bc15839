"""The doors of a running server: HTTP and gRPC."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

import grpc
from openai import AsyncOpenAI, BadRequestError, OpenAIError

from triforce_core.client.aio import AsyncTriForceClient
from triforce_core.client.calls import KEY_VARIABLE
from triforce_core.client.errors import from_rpc_error
from triforce_core.errors import TriForceError, require
from triforce_tools.bench.prompts import HELD_OUT, held_out_path

# For the tiers that a server has: left to itself, it might decode each answer differently.
RETRIEVAL_LOOKAHEAD, DRAFT_LOOKAHEAD = 8, 3
LONGEST_TOKEN = 8  # characters of text that are read for each token of a prompt; most tokens are shorter


@dataclass(frozen=True, slots=True)
class Question:
    """One request. The model's own stop tokens do not end its answer."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    lookaheads: tuple[int, int] | None = None  # None: the server chooses
    cache_salt: str = ""  # KV is shared with questions of the same salt only
    seed: int = 0


@dataclass
class Answer:
    """One answer as its client sees it; it fills while the server answers. Times are those of `time.perf_counter`."""

    sent_s: float = field(default_factory=time.perf_counter)
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # of each chunk: when, and its tokens
    num_tokens: int = 0
    tokens: list[int] = field(default_factory=list)  # only gRPC tells these, and the acceptance
    text: str = ""  # only HTTP tells it
    acceptance: float | None = None  # share of the retrieval tier's tokens that the target accepted
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    def arrived(self, num_tokens: int) -> None:
        self.arrivals.append((time.perf_counter(), num_tokens))
        self.num_tokens += num_tokens
        self.begun.set()

    @property
    def first_text_s(self) -> float:
        return self.arrivals[0][0] - self.sent_s

    @property
    def ms_per_token(self) -> float:
        """After the first chunk, which has one token: the pass that ends the prompt gives it."""
        return 1e3 * (self.arrivals[-1][0] - self.arrivals[0][0]) / (self.num_tokens - 1)

    def longest_gap_ms(self, since_s: float = 0.0) -> float:
        """The longest wait between two chunks, the second of them after that moment; the first wait does not count, in
        which the drafting tiers take up the text.
        """
        return 1e3 * max(after - before for (before, _), (after, _) in pairwise(self.arrivals[1:]) if after > since_s)


Ask = Callable[[Question, Answer], Coroutine[Any, Any, None]]  # fills the answer


@dataclass(frozen=True)
class Server:
    """A running server, and its doors by their names."""

    url: str
    client: AsyncOpenAI
    doors: dict[str, Ask]
    model: str
    lookaheads: tuple[int, int]  # of the retrieval and the draft tier; 0 for one that it lacks

    async def status(self) -> Any:
        return await self.client.get(f"{self.url}/status", cast_to=object)

    async def refuses(self, prompt: str) -> None:
        """Send a prompt that is too long, and wait for the refusal."""
        with suppress(BadRequestError):
            await self.client.completions.create(model=self.model, prompt=prompt, max_tokens=1)

    async def held_out_tokens(self, count: int, first_file: int = 0) -> tuple[int, ...]:
        """The first `count` of the server's tokens of text that the demo pair never saw, from this file on."""
        paths = map(held_out_path, HELD_OUT[first_file:] + HELD_OUT[:first_file])
        text = "".join(path.read_text(encoding="utf-8") for path in paths)[: LONGEST_TOKEN * count]
        found: Any = await self.client.post(f"{self.url}/tokenize", body={"prompt": text}, cast_to=object)
        tokens = tuple(found["tokens"])[:count]
        require(len(tokens) == count, "context", count, f"is more than the {len(tokens)} tokens of held-out text")
        return tokens


@asynccontextmanager
async def open_server(url: str, grpc_address: str) -> AsyncIterator[Server]:
    """The server behind both addresses. Calls send the API key of the environment.

    Raises `InvalidValueError` if the server has several replicas, since then nobody knows which one answers, and turns
    what clients raise within the context into a `TriForceError`.
    """
    url = url.rstrip("/").removesuffix("/v1")
    key = os.environ.get(KEY_VARIABLE) or "none"
    try:
        ours = AsyncTriForceClient(grpc_address, retries=0)
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client, ours:
            status: Any = await client.get(f"{url}/status", cast_to=object)
            tiers = {tier["tier"] for tier in status["tiers"]}
            targets = [tier["tier"] for tier in status["tiers"]].count("target")
            require(targets == 1, "url", url, f"must be a server of one replica; it has {targets} targets")
            model = status["target"]["model"]
            doors = {"grpc": grpc_door(ours), "http": http_door(client, model)}
            lookaheads = RETRIEVAL_LOOKAHEAD * ("retrieval" in tiers), DRAFT_LOOKAHEAD * ("draft" in tiers)
            yield Server(url, client, doors, model, lookaheads)
    except OpenAIError as error:
        raise TriForceError(f"{url}: {' '.join(str(error).split())[:300]}") from None
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None
    except ValueError as error:  # a key or an address that cannot be sent
        raise TriForceError(str(error)) from None


def http_door(client: AsyncOpenAI, model: str) -> Ask:
    async def ask(question: Question, answer: Answer) -> None:
        stream = await client.completions.create(
            model=model,
            prompt=list(question.prompt),
            max_tokens=question.max_tokens,
            temperature=question.temperature,
            seed=question.seed,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={
                "ignore_eos": True,
                "cache_salt": question.cache_salt,
                "speculation": question.lookaheads and {"lookaheads": question.lookaheads},
            },
        )
        async for chunk in stream:
            # llama.cpp sends a chunk without text as soon as it begins to read the prompt.
            if chunk.choices and (chunk.choices[0].text or answer.arrivals):
                answer.arrived(0)  # OpenAI's format tells the number of tokens at the end
                answer.text += chunk.choices[0].text
            if chunk.usage:
                answer.num_tokens = chunk.usage.completion_tokens

    return ask


def grpc_door(client: AsyncTriForceClient) -> Ask:
    async def ask(question: Question, answer: Answer) -> None:
        arguments = {field.name: getattr(question, field.name) for field in fields(question)}
        async for chunk in client.stream(**arguments, ignore_eos=True):
            if chunk.token_ids:
                answer.arrived(len(chunk.token_ids))
                answer.tokens += chunk.token_ids
            if chunk.stats:
                answer.acceptance = chunk.stats.acceptance.retrieval

    return ask
