"""`triforce generate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from deploy.cli.options import JsonOption, SeedOption, decoding_settings, sampling_params, with_options_of
from triforce_core.config import Settings
from triforce_core.detokenizer import OutputText, StopString, TextDelta, TokenText, joined, spellings
from triforce_core.errors import InvalidValueError, require
from triforce_core.messages import Origin, TokenLogprobs
from triforce_core.sampling.guides import Guide, no_token

if TYPE_CHECKING:
    from triforce_core import client
    from triforce_core.engine.sequence import Output, Request, Stats


COLOURS = {Origin.DRAFT: "green", Origin.RETRIEVAL: "cyan", Origin.TARGET: "default", Origin.LOOKUP: "yellow"}
CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}  # C0, DEL and C1


def guide(
    *,
    json_schema: Annotated[Path | None, typer.Option(help="file with a JSON schema that the output obeys")] = None,
    json_object: Annotated[bool, typer.Option(help="the output is a JSON object")] = False,
    regex: Annotated[str | None, typer.Option(help="regular expression that the output matches")] = None,
    choice: Annotated[list[str] | None, typer.Option(help="the output is one of these texts")] = None,
    grammar: Annotated[Path | None, typer.Option(help="file with a grammar in EBNF that the output obeys")] = None,
) -> Guide | None:
    """The form of the output, from at most one of these options."""
    forms = {
        "json_schema": read_text(json_schema, "json-schema") if json_schema else None,
        "json_object": json_object,
        "regex": regex,
        "choice": choice,
        "grammar": read_text(grammar, "grammar") if grammar else None,
    }
    given = [Guide(form, value) for form, value in forms.items() if value not in (None, False, [])]
    rule = "are too many: give at most one of --json-schema, --json-object, --regex, --choice, --grammar"
    require(len(given) < 2, "guide", [each.form for each in given], rule)
    return given[0] if given else None


@with_options_of(sampling_params, guide, decoding_settings)
def generate(
    sampling: dict[str, Any],
    guide: Guide | None,
    settings: Settings,
    prompt_file: Annotated[Path, typer.Option(help="text to continue; - reads standard input")],
    max_tokens: Annotated[int, typer.Option(help="at most this many output tokens")] = 128,
    seed: SeedOption = 0,
    n: Annotated[int, typer.Option("--n", min=1, help="independent completions, with seeds derived from --seed")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="the output ends before this text")] = None,
    stop_token_id: Annotated[list[int] | None, typer.Option(help="a token that ends the output")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="the model's own stop tokens do not end the output")] = False,
    bad_word: Annotated[list[str] | None, typer.Option(help="a text that never occurs in the output")] = None,
    logprobs: Annotated[int | None, typer.Option(help="with --json: logprobs and this many alternatives")] = None,
    prompt_logprobs: Annotated[int | None, typer.Option(help="the same for the prompt's tokens")] = None,
    echo: Annotated[bool, typer.Option(help="print the prompt first")] = False,
    as_json: JsonOption = False,
) -> None:
    """Continue a text, with all tiers in this process. Tokens are coloured by the tier that proposed them.

    With --json and --n, each completion is printed as one line.
    """
    text = read_text(prompt_file, "prompt-file")
    require(text != "", "prompt-file", str(prompt_file), "must not be empty")
    rule = "cannot be combined with --json-schema, --regex and the like: such an output must be able to end"
    require(guide is None or not ignore_eos, "ignore-eos", ignore_eos, rule)

    from deploy.choices import fitted
    from triforce_core.building.followers import local_ranks
    from triforce_core.building.loading import load_local_engine
    from triforce_core.building.runners import grammars_for
    from triforce_core.engine.engine import run_to_end
    from triforce_core.engine.sequence import FinishReason, Request, nth_seed
    from triforce_core.models.files import end_token_ids, load_tokenizer, stop_token_ids
    from triforce_core.models.generation import default_sampling

    settings, tokenizer = fitted(settings), load_tokenizer(settings.target.model)
    own = default_sampling(settings)
    stop_strings = [StopString(text).text for text in stop or ()]  # refuses empty ones before anything is loaded
    banned = [tuple(tokenizer(word, add_special_tokens=False)["input_ids"]) for word in spellings(bad_word or ())]
    stops = (*(() if ignore_eos else stop_token_ids(settings.target.model)), *(stop_token_id or ()))
    request = Request(
        prompt=tuple(tokenizer(text)["input_ids"]),
        max_tokens=max_tokens,
        sampling=replace(own, **sampling, bad_word_ids=tuple(dict.fromkeys((*own.bad_word_ids, *banned)))),
        seed=seed,
        lookaheads=None if settings.controlled else settings.speculation.effective,
        stop_token_ids=stops,
        grammar=guide.grammar() if guide else "",
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    if guide is not None:
        guide.check(grammars_for(settings, len(tokenizer)).compile(request.grammar).result().get_error())
        request = replace(request, stop_token_ids=(*stops, *end_token_ids(tokenizer)))
    meaning = TokenText(tokenizer)
    console = Console(highlight=False, soft_wrap=True)
    with local_ranks(settings) as ranks:
        engine = load_local_engine(settings, ranks=ranks)
        for index in range(n):
            completion = Completion(replace(request, seed=nth_seed(seed, index)), meaning, stop_strings)
            if echo and not as_json:
                show(console, [TextDelta(text, (), b"")])
            for output in run_to_end(engine, [completion.request]):
                new = completion.add(output)
                if not as_json:
                    show(console, new)
                if completion.ended and not output.finish_reason:
                    engine.cancel(output.sequence_id)
            if completion.finish_reason is FinishReason.NO_TOKEN:
                raise no_token(guide, completion.text.num_tokens)
            if as_json:
                typer.echo(json.dumps(completion.report(text if echo else "")))
                continue
            console.print()
            place = f"{settings.dtype}, LOSSY: {settings.target.lossy}" if settings.target.lossy else settings.dtype
            console.print(legend(completion.stats, place))


class Completion:
    """One completion as it is decoded."""

    def __init__(self, request: Request, meaning: TokenText, stop: list[str]) -> None:
        self.request = request
        self.text = OutputText(
            meaning, stop=stop, end_tokens=request.stop_token_ids, min_tokens=request.sampling.min_tokens
        )
        self.pieces: list[TextDelta] = []
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self.ended = False

    def add(self, output: Output) -> list[TextDelta]:
        """Take an output of the engine; returns its text in pieces of one token each, so that each has one origin."""
        if self.ended:
            return []
        self.stats = output.stats
        self.prompt_logprobs += output.prompt_logprobs
        scores = output.logprobs or [None] * len(output.tokens)
        new = [
            self.text.feed([token], bytes([origin]), [score] if score else ())
            for token, origin, score in zip(output.tokens, output.origins, scores, strict=True)
        ]
        if output.finish_reason or self.text.stopped:
            new.append(self.text.finish())
            self.ended, self.finish_reason = True, "stop" if self.text.stopped else output.finish_reason
        self.pieces += new
        return new

    def report(self, echoed: str) -> dict[str, Any]:
        whole, request, stats = joined(self.pieces), self.request, self.stats
        report: dict[str, Any] = {
            "text": echoed + whole.text,
            "token_ids": whole.tokens,
            "finish_reason": self.finish_reason,
            "seed": request.seed,
            "usage": {"prompt_tokens": len(request.prompt), "completion_tokens": self.text.num_tokens},
            "stats": {
                "prefill_s": stats.prefill_s,
                "ms_per_token": stats.ms_per_token,
                "tokens_per_round": stats.tokens_per_round,
                "acceptance": stats.acceptance,
                "snapshots": stats.snapshots,
            },
        }
        if request.logprobs is not None:
            report["logprobs"] = [as_json_of(each) for each in whole.logprobs]
        if request.prompt_logprobs is not None:
            report["prompt_logprobs"] = [as_json_of(each) for each in self.prompt_logprobs]
        return report


def as_json_of(score: TokenLogprobs) -> dict[str, Any]:
    return {"logprob": score.logprob, "top": dict(score.top)}


def read_text(path: Path, option: str) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidValueError(option, str(path), f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidValueError(option, str(path), f"is not UTF-8 text: {error.reason}") from None


def show(console: Console, pieces: Iterable[TextDelta]) -> None:
    """Print pieces of one token each in the colours of their origins; text without a token has no colour.

    The pieces are printed as segments, because `rich.text.Text` would replace tabs and drop control characters. They
    are dropped here for a terminal, which a model's text could otherwise command.
    """
    styles = {origin: Style.parse(colour) for origin, colour in COLOURS.items()}
    dropped = CONTROLS if console.is_terminal else {}
    segments = [
        Segment(piece.text.translate(dropped), styles[Origin(piece.origins[0])] if piece.origins else None)
        for piece in pieces
    ]
    console.print(Segments(segments), end="")


def legend(stats: Stats | client.Stats, place: str) -> Text:
    """A line with each origin's name in its colour, the dtype or the server, and the times of the output."""
    costs = [f"prefill {stats.prefill_s:.2f} s"]
    if stats.ms_per_token is not None and stats.tokens_per_round is not None:  # None: only the prefill ran
        costs += [f"{stats.ms_per_token:.2f} ms a token", f"{stats.tokens_per_round:.2f} tokens a round"]
    names = ((f"{origin.name.lower()} ", COLOURS[origin]) for origin in Origin)
    return Text.assemble(*names, (f"| {place} | {', '.join(costs)}", "dim"))
