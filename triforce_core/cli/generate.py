"""`triforce generate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from triforce_core.cli.options import JsonOption, SeedOption, decoding_settings, sampling_params, with_options_of
from triforce_core.config import Settings
from triforce_core.errors import InvalidValueError, require
from triforce_core.messages import SamplingParams, Tier
from triforce_core.text import OutputText, TextDelta, TokenText, joined

if TYPE_CHECKING:
    from triforce_core.engine.sequence import Stats

COLOURS = {Tier.DRAFT: "green", Tier.RETRIEVAL: "cyan", Tier.TARGET: "default"}


@with_options_of(sampling_params, decoding_settings)
def generate(
    sampling: SamplingParams,
    settings: Settings,
    prompt_file: Annotated[Path, typer.Option(help="text to continue; - reads standard input")],
    max_tokens: Annotated[int, typer.Option(help="at most this many output tokens")] = 128,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Continue a text, with all tiers in this process. Tokens are coloured by the tier that proposed them."""
    text = read_prompt(prompt_file)
    require(text != "", "prompt-file", str(prompt_file), "must not be empty")

    from triforce_core.engine.engine import run_to_end
    from triforce_core.engine.followers import local_ranks
    from triforce_core.engine.loading import load_local_engine
    from triforce_core.engine.local_threads import choose_threads
    from triforce_core.engine.sequence import Request
    from triforce_core.models.load import load_tokenizer, stop_token_ids

    tokenizer = load_tokenizer(settings.target.model)
    prompt = tuple(tokenizer(text)["input_ids"])
    stops = stop_token_ids(settings.target.model)
    request = Request(prompt, max_tokens, sampling, seed, settings.speculation.effective, stops)
    console = Console(highlight=False, soft_wrap=True)
    output, pieces = OutputText(TokenText(tokenizer), end_tokens=stops), list[TextDelta]()
    with local_ranks(settings) as ranks:
        engine = load_local_engine(settings, ranks=ranks)
        choose_threads(engine, settings, Console(stderr=True, highlight=False).print)
        for step in run_to_end(engine, [request]):
            # One token at a time, so that each piece has one origin.
            new = [output.feed([t], bytes([origin])) for t, origin in zip(step.tokens, step.origins, strict=True)]
            if step.finish_reason is not None:
                new.append(output.finish())
            if not as_json:
                show(console, new)
            pieces += new
    stats, completion = step.stats, joined(pieces)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "text": completion.text,
                    "token_ids": completion.tokens,
                    "finish_reason": step.finish_reason,
                    "usage": {"prompt_tokens": len(prompt), "completion_tokens": output.num_tokens},
                    "stats": {
                        "prefill_s": stats.prefill_s,
                        "ms_per_token": stats.ms_per_token,
                        "tokens_per_round": stats.tokens_per_round,
                        "acceptance": stats.acceptance,
                        "snapshots": stats.snapshots,
                    },
                }
            )
        )
        return
    console.print()
    console.print(legend(stats, settings))


def read_prompt(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidValueError("prompt-file", str(path), f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidValueError("prompt-file", str(path), f"is not UTF-8 text: {error.reason}") from None


def show(console: Console, pieces: Iterable[TextDelta]) -> None:
    """Print pieces of one token each in the colours of their tiers; text without a token has no colour.

    The pieces are printed as segments, because `rich.text.Text` would replace tabs and drop control characters.
    """
    styles = {tier: Style.parse(colour) for tier, colour in COLOURS.items()}
    segments = [Segment(piece.text, styles[Tier(piece.origins[0])] if piece.origins else None) for piece in pieces]
    console.print(Segments(segments), end="")


def legend(stats: Stats, settings: Settings) -> Text:
    """A line with each tier's name in its colour, the dtype, and the times of the output."""
    costs = [f"prefill {stats.prefill_s:.2f} s"]
    if stats.ms_per_token is not None and stats.tokens_per_round is not None:  # None: only the prefill ran
        costs += [f"{stats.ms_per_token:.2f} ms a token", f"{stats.tokens_per_round:.2f} tokens a round"]
    names = ((f"{tier.name.lower()} ", COLOURS[tier]) for tier in Tier)
    return Text.assemble(*names, (f"| {settings.dtype} | {', '.join(costs)}", "dim"))
