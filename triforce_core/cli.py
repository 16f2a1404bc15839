"""The `triforce` command. Heavy imports wait until a command needs them; every error is one line and exit code 2."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from triforce_core.config import Settings, load_settings
from triforce_core.errors import InvalidValueError, TriForceError, require
from triforce_core.messages import SamplingParams, Tier

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
bench_app = typer.Typer(no_args_is_help=True, help="Benchmarks, in ratios within one run.")
app.add_typer(bench_app, name="bench")

# The base of all usage errors, whichever click typer brings.
UsageError: Any = typer.BadParameter.__bases__[0]

COLOURS = {Tier.DRAFT: "green", Tier.RETRIEVAL: "cyan", Tier.TARGET: "default"}

ConfigOption = Annotated[Path | None, typer.Option("--config", help="YAML file of settings; see `triforce config`")]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object")]
TiersOption = Annotated[str | None, typer.Option(help="target | retrieval,target | draft,retrieval,target")]
LookaheadsOption = Annotated[str | None, typer.Option(help="tokens drafted by retrieval and by draft, e.g. 8,3")]
TemperatureOption = Annotated[float, typer.Option(help="0 is greedy")]
SeedOption = Annotated[int, typer.Option(help="the same seed gives the same tokens")]


def parse_lookaheads(text: str) -> list[int]:
    parts = text.split(",")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        numbers = []
    require(len(numbers) == 2, "lookaheads", text, "must be two whole numbers: retrieval,draft")
    return numbers


def settings_from(
    config: Path | None,
    *,
    tiers: str | None = None,
    lookaheads: str | None = None,
    budget: int | None = None,
    chunk: int | None = None,
    dtype: str | None = None,
    target: str | None = None,
    drafter: str | None = None,
    threads: int | None = None,
    max_sequences: int | None = None,
    port: int | None = None,
) -> Settings:
    """Settings of the file with the command line's on top."""
    sections: dict[str, dict[str, Any]] = {
        "speculation": {"tiers": tiers, "lookaheads": lookaheads and parse_lookaheads(lookaheads)},
        "retrieval": {"budget": budget, "chunk": chunk},
        "target": {"model": target},
        "draft": {"model": drafter},
        "threads": {"decode": threads, "prefill": threads},
        "server": {"port": port},
    }
    given = {name: {k: v for k, v in values.items() if v is not None} for name, values in sections.items()}
    plain = {name: v for name, v in {"dtype": dtype, "max_sequences": max_sequences}.items() if v is not None}
    return load_settings(config, **{name: values for name, values in given.items() if values}, **plain)


def read_prompt(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidValueError("prompt-file", str(path), f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidValueError("prompt-file", str(path), f"is not UTF-8 text: {error.reason}") from None


@app.command()
def generate(
    prompt_file: Annotated[Path, typer.Option(help="text to continue; - reads standard input")],
    max_tokens: Annotated[int, typer.Option(help="at most this many output tokens")] = 128,
    temperature: TemperatureOption = 1.0,
    top_p: Annotated[float, typer.Option(help="keep the most probable tokens up to this probability")] = 1.0,
    top_k: Annotated[int, typer.Option(help="keep the k most probable tokens; 0 keeps all")] = 0,
    min_p: Annotated[float, typer.Option(help="keep tokens this probable relative to the best")] = 0.0,
    seed: SeedOption = 0,
    tiers: TiersOption = None,
    lookaheads: LookaheadsOption = None,
    budget: Annotated[int | None, typer.Option(help="tokens of KV in the retrieval tier")] = None,
    chunk: Annotated[int | None, typer.Option(help="tokens selected together")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 | bfloat16")] = None,
    target: Annotated[str | None, typer.Option(help="model directory or hub id")] = None,
    drafter: Annotated[str | None, typer.Option(help="model directory or hub id")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads")] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a text, with all tiers in this process. Tokens are coloured by the tier that proposed them."""
    sampling = SamplingParams(temperature, top_k, top_p, min_p)
    settings = settings_from(
        config,
        tiers=tiers,
        lookaheads=lookaheads,
        budget=budget,
        chunk=chunk,
        dtype=dtype,
        target=target,
        drafter=drafter,
        threads=threads,
        max_sequences=1,
    )
    text = read_prompt(prompt_file)
    require(text != "", "prompt-file", str(prompt_file), "must not be empty")

    from triforce_core.engine.local import local_engine, run_to_end
    from triforce_core.engine.sequence import Request
    from triforce_core.models.load import check_pair, load_model, load_tokenizer, stop_token_ids

    drafting = settings.speculation.effective[1] > 0
    check_pair(settings.target.model, settings.draft.model if drafting else None)
    tokenizer = load_tokenizer(settings.target.model)
    prompt = tuple(tokenizer(text)["input_ids"])
    engine = local_engine(
        load_model(settings.target.model, "target", settings.dtype, settings.device),
        load_model(settings.draft.model, "drafter", settings.dtype, settings.device) if drafting else None,
        settings,
    )
    stops = stop_token_ids(settings.target.model)
    request = Request(prompt, max_tokens, sampling, seed, settings.speculation.effective, stops)
    console, tokens, shown = Console(highlight=False, soft_wrap=True), list[int](), ""
    for output in run_to_end(engine, [request]):
        tokens += output.tokens
        if not as_json:
            shown = print_block(console, tokenizer, tokens, output.origins, shown)
    stats, completion = output.stats, tokenizer.decode(tokens, skip_special_tokens=True)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "text": completion,
                    "token_ids": tokens,
                    "finish_reason": output.finish_reason,
                    "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)},
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
    legend = Text.assemble(*((f"{tier.name.lower()} ", COLOURS[tier]) for tier in Tier))
    legend.append(f"| prefill {stats.prefill_s:.2f} s, {stats.ms_per_token:.2f} ms a token, ", "dim")
    legend.append(f"{stats.tokens_per_round:.2f} tokens a round", "dim")
    console.print(legend)


def print_block(console: Console, tokenizer: Any, tokens: list[int], origins: bytes, shown: str) -> str:
    """Print the newest tokens, each in its tier's colour; returns all the text shown so far.

    A character of several tokens appears with its last one.
    """
    for index, origin in enumerate(origins):
        upto = tokens[: len(tokens) - len(origins) + index + 1]
        text = tokenizer.decode(upto, skip_special_tokens=True)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            console.print(Text(text[len(shown) :], COLOURS[Tier(origin)]), end="")
            shown = text
    return shown


@app.command()
def config(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Print all settings, the defaults filled in."""
    settings = load_settings(config).model_dump(mode="json")
    typer.echo(json.dumps(settings) if as_json else yaml.safe_dump(settings, sort_keys=False), nl=as_json)


@app.command()
def serve(
    config: ConfigOption = None,
    port: Annotated[int | None, typer.Option(help="HTTP port")] = None,
) -> None:
    """Serve the three tiers as Ray actors behind an OpenAI-compatible endpoint."""
    settings = settings_from(config, port=port)
    from deploy.app import run

    run(settings)


@bench_app.command("decode")
def bench_decode(
    context: Annotated[int, typer.Option(help="prompt tokens")] = 7936,
    output: Annotated[int, typer.Option(help="output tokens")] = 256,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = 0,
    repeats: Annotated[int, typer.Option(min=3, help="runs of each mode; the medians are reported")] = 3,
    first_file: Annotated[int, typer.Option(min=0, help="which held-out file the prompt begins with")] = 0,
    tiers: TiersOption = None,
    lookaheads: LookaheadsOption = None,
    budget: Annotated[int | None, typer.Option()] = None,
    chunk: Annotated[int | None, typer.Option()] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 | bfloat16")] = None,
    target: Annotated[str | None, typer.Option()] = None,
    drafter: Annotated[str | None, typer.Option()] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads")] = None,
    transformers: Annotated[bool, typer.Option("--transformers", help="measure its `generate` too")] = False,
    max_load: Annotated[float, typer.Option(help="refuse above this load average")] = 1.0,
    force: Annotated[bool, typer.Option("--force", help="run whatever the load")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Plain decoding against TriForce on the same held-out text, in alternating order."""
    settings = settings_from(
        config,
        tiers=tiers,
        lookaheads=lookaheads,
        budget=budget,
        chunk=chunk,
        dtype=dtype,
        target=target,
        drafter=drafter,
        threads=threads,
        max_sequences=1,
    )
    from triforce_core.bench.decode import bench_decode as measure
    from triforce_core.bench.machine import quiet_machine

    progress = Console(stderr=True, highlight=False)
    with quiet_machine(max_load, force=force):
        result = measure(
            settings,
            context=context,
            output=output,
            sampling=SamplingParams(temperature),
            seed=seed,
            repeats=repeats,
            first_file=first_file,
            with_transformers=transformers,
            report=progress.print,
        )
    if as_json:
        typer.echo(json.dumps(result))
        return
    table = Table(show_header=False)
    for name, value in result.items():
        table.add_row(name, json.dumps(value) if isinstance(value, dict | list) else f"{value}")
    Console().print(table)


def main() -> None:
    """Entry point: what users do wrong is one line on standard error and exit code 2."""
    try:
        app(standalone_mode=False)
    except UsageError as error:
        message = error.format_message()
    except TriForceError as error:
        message = str(error)
    except KeyboardInterrupt:
        sys.exit(130)
    else:
        return
    typer.echo(f"triforce: {message}", err=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
