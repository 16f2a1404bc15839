"""`triforce chat`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from deploy.cli.generate import legend, show
from deploy.cli.options import sampling_params, with_options_of
from triforce_core.detokenizer import TextDelta
from triforce_core.errors import InvalidValueError, TriForceError

if TYPE_CHECKING:
    from triforce_core.client import Chunk, TriForceClient

HELP = "/reset forgets the conversation, /quit ends; Ctrl-C stops an answer"


@with_options_of(sampling_params)
def chat(
    sampling: dict[str, Any],
    address: Annotated[str, typer.Option(help="host:port of the server's gRPC API")] = "127.0.0.1:9000",
    api_key: Annotated[
        str | None,
        typer.Option(help="by default $TRIFORCE_API_KEY; prefer it, since other users can see options of a process"),
    ] = None,
    tls: Annotated[bool, typer.Option("--tls", help="encrypt the connection")] = False,
    root_certificates: Annotated[Path | None, typer.Option(help="PEM file with the authorities to trust")] = None,
    system: Annotated[str | None, typer.Option(help="the first message, of the role system")] = None,
    max_tokens: Annotated[int, typer.Option(help="at most this many tokens in an answer")] = 1024,
    seed: Annotated[int | None, typer.Option(help="the same seed gives the same answers")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="an answer ends before this text")] = None,
) -> None:
    """Chat with a running server. Tokens are coloured by the tier that proposed them.

    /reset forgets the conversation, /quit ends. Where standard input is no terminal, each line is a message.
    """
    from triforce_core.client import TriForceClient

    asked: dict[str, Any] = {"max_tokens": max_tokens, "seed": seed, "stop": stop or (), **sampling}
    asked["logit_bias"] = dict(sampling["logit_bias"])
    try:
        client = TriForceClient(address, api_key=api_key, tls=tls, root_certificates=root_certificates)
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
        raise InvalidValueError("root-certificates", str(root_certificates), reason) from None
    except ValueError as error:
        raise TriForceError(str(error)) from None
    console = Console(highlight=False, soft_wrap=True)
    interactive = sys.stdin.isatty()
    with client:
        model = client.models()[0]
        if interactive:
            console.print(f"{model.id} at {address}, {model.context_length} tokens. {HELP}.", style="dim")
        conversation = Conversation(client, console, f"{model.id} at {address}", system, asked)
        for line in typed_lines() if interactive else (piped.rstrip("\n") for piped in sys.stdin):
            if line == "/quit":
                return
            try:
                conversation.take(line)
            except TriForceError as error:
                if not interactive:
                    raise
                typer.echo(f"triforce: {error}", err=True)


def typed_lines() -> Iterator[str]:
    """Lines from the terminal, which can be edited and recalled. Ctrl-C drops the line, Ctrl-D ends."""
    import readline  # noqa: F401 - `input` uses it once it is imported

    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


class Conversation:
    """The messages so far, and how the next answer is fetched and shown."""

    def __init__(
        self, client: TriForceClient, console: Console, place: str, system: str | None, asked: dict[str, Any]
    ) -> None:
        self.client, self.console, self.place, self.asked = client, console, place, asked
        self.opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages = [*self.opening]

    def take(self, line: str) -> None:
        """Do what a line says. Raises `CallError`; the conversation is then as it was before."""
        if line == "/reset":
            self.messages = [*self.opening]
        elif line.startswith("/"):
            self.console.print(f"unknown command {line.split(maxsplit=1)[0]}: {HELP}", style="dim", markup=False)
        elif line.strip():
            asked = [*self.messages, {"role": "user", "content": line}]
            text = self.answer(asked)
            if text:  # an answer that was stopped before its first text leaves nothing behind
                self.messages = [*asked, {"role": "assistant", "content": text}]

    def answer(self, messages: list[dict[str, str]]) -> str:
        """Show the answer as it comes; returns what was shown of it. An interrupt stops it."""
        text, last = "", None
        try:
            with self.client.stream_chat(messages, **self.asked) as stream:
                for chunk in read_apart(stream):
                    text, last = text + chunk.text, chunk
                    show(self.console, by_token(chunk))
        except KeyboardInterrupt:
            self.console.print(" [stopped]", style="dim", markup=False, end="")
        finally:
            self.console.print()
        if last is not None and last.stats is not None and self.console.is_terminal:
            self.console.print(legend(last.stats, self.place))
        return text


def read_apart(stream: Iterable[Chunk]) -> Iterator[Chunk]:
    """The chunks of a stream that another thread reads.

    An interrupt is raised in the main thread, wherever that is. Inside gRPC's code it can leave a lock taken for good;
    the next call would then hang.
    """
    arrived: SimpleQueue[Chunk | Exception | None] = SimpleQueue()

    def read() -> None:
        try:
            for chunk in stream:
                arrived.put(chunk)
            arrived.put(None)
        except Exception as error:
            arrived.put(error)

    Thread(target=read, name="read-answer", daemon=True).start()
    while (each := arrived.get()) is not None:
        if isinstance(each, Exception):
            raise each
        yield each


def by_token(chunk: Chunk) -> Iterable[TextDelta]:
    """The chunk's text in pieces of one token each, so that each has one origin."""
    start = 0
    for token, origin, length in zip(chunk.token_ids, chunk.origins, chunk.text_lengths, strict=False):
        yield TextDelta(chunk.text[start : start + length], (token,), bytes([origin]))
        start += length
    yield TextDelta(chunk.text[start:], (), b"")
