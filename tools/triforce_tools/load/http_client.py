"""A client of OpenAI's completions over HTTP, with answers as server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp

from triforce_core.client.calls import authorization
from triforce_core.client.results import Usage
from triforce_core.errors import require
from triforce_tools.load.answers import FailedError, Piece, Question

# Servers close idle connections, uvicorn after 5 s. A request sent at that moment would fail, though the server is
# sound.
KEPT_IDLE_S = 2.0
NO_LIMITS = aiohttp.ClientTimeout(total=None, sock_connect=None)
TOO_MANY_REQUESTS = 429


class HttpClient:
    """A client of the server at `url`, with or without `/v1` at its end. Open it with `async with`. It sends the API
    key of the environment, as the SDK does.
    """

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # brackets without an end, or a port out of range
            sound = False
        require(sound, "url", url, "must be an address such as http://127.0.0.1:8000")
        self.address = url.rstrip("/").removesuffix("/v1")
        self._headers = dict(authorization())

    async def __aenter__(self) -> Self:
        # No limit of connections and no time limits: requests wait in the server only, and the sender times them.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_IDLE_S)
        self._session = aiohttp.ClientSession(connector=connector, timeout=NO_LIMITS, headers=self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._session.close()

    async def models(self) -> list[str]:
        with failures():
            async with self._session.get(f"{self.address}/v1/models") as response:
                await check_status(response)
                body = await response.text()
        with malformed():
            return [str(model["id"]) for model in json.loads(body)["data"]]

    async def answer(self, question: Question) -> AsyncGenerator[Piece, None]:
        body: dict[str, Any] = {
            "model": question.model,
            "prompt": question.prompt,
            "max_tokens": question.max_tokens,
            "temperature": question.temperature,
            "seed": question.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if question.priority is not None:  # not a field of OpenAI's: many servers would refuse it
            body["priority"] = question.priority
        if question.lookaheads is not None:
            body["speculation"] = {"lookaheads": question.lookaheads}
        done = False
        with failures():
            async with self._session.post(f"{self.address}/v1/completions", json=body) as response:
                await check_status(response)
                async for line in response.content:  # to its end, so that the connection can be used again
                    if line.startswith(b"data:"):
                        data = line.removeprefix(b"data:").strip()
                        done = done or data == b"[DONE]"
                        if not done:
                            yield piece_of(data)
        if not done:
            raise FailedError("cut off", "the stream ended without data: [DONE]")


@contextmanager
def failures() -> Iterator[None]:
    """Turn what goes wrong between us and the server into a `FailedError`."""
    try:
        yield
    except (aiohttp.ClientError, OSError) as error:
        raise FailedError(type(error).__name__, str(error)) from None
    except ValueError as error:  # a line longer than aiohttp reads, or a body that is not text
        raise FailedError("malformed answer", str(error)) from None


@contextmanager
def malformed() -> Iterator[None]:
    """Turn an answer of another shape than OpenAI's into a `FailedError`."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise FailedError("malformed answer", f"{type(error).__name__}: {error}") from None


async def check_status(response: aiohttp.ClientResponse) -> None:
    status = response.status
    if status != 200:
        message = message_in(await response.text(errors="replace"))
        raise FailedError(f"HTTP {status}", message, refused=status == TOO_MANY_REQUESTS)


def message_in(body: str) -> str:
    """The message of an error's body in OpenAI's format, or a body in any other."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body


def piece_of(data: bytes) -> Piece:
    """The piece in one event. Raises `FailedError` for an error, which comes as an event once the answer has begun."""
    with malformed():
        chunk = json.loads(data)
        if error := chunk.get("error"):
            known = error if isinstance(error, dict) else {}
            kind = known.get("code") or known.get("type") or "unknown"
            raise FailedError(f"error event: {kind}", str(known.get("message", error)))
        text = "".join(choice.get("text") or "" for choice in chunk["choices"])
        usage = chunk.get("usage")
        return Piece(text, usage and Usage(int(usage["prompt_tokens"]), int(usage["completion_tokens"])))
