"""`triforce demo`: train, export and measure the demo pair."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from triforce_core.cli.options import JsonOption, with_options_of
from triforce_core.demo import weights_dir
from triforce_tools.cli.figures import show_figures
from triforce_tools.cli.options import ThreadsOption
from triforce_tools.demo_training.settings import DEFAULT_SETTINGS, DemoSettings, load_settings

WeightsArgument = Annotated[
    Path | None,
    typer.Argument(exists=True, file_okay=False, help="an exported pair", show_default="the installed demo pair"),
]
SettingsOption = Annotated[
    Path,
    typer.Option(
        "--settings", help="YAML file of all settings that shape the weights", show_default="demo_training/train.yaml"
    ),
]
CacheDirOption = Annotated[
    Path | None, typer.Option(help="folder of corpus and checkpoints, in place of the one in the settings")
]
TokenizerOption = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="a tokenizer.json, in place of the one in the settings")
]
DeviceOption = Annotated[str, typer.Option(help="cpu | cuda | cuda:N")]
DtypeOption = Annotated[str, typer.Option(help="auto | float32 | bfloat16 | float16")]

demo_app = typer.Typer(no_args_is_help=True, help="Train, export and measure the demo pair.")


def demo_settings(
    settings_file: SettingsOption = DEFAULT_SETTINGS,
    cache_dir: CacheDirOption = None,
    tokenizer: TokenizerOption = None,
) -> DemoSettings:
    """The settings of commands that work on a training run."""
    return load_settings(settings_file, cache_dir=cache_dir, tokenizer=tokenizer)


@demo_app.command()
@with_options_of(demo_settings)
def train(
    settings: DemoSettings,
    resume: Annotated[bool, typer.Option("--resume", help="continue the run in the cache folder")] = False,
    minutes: Annotated[float | None, typer.Option(min=0, help="stop after this much active time")] = None,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    export_to: Annotated[
        Path | None, typer.Option("--export", help="at the end, write weights, figures and card into this folder")
    ] = None,
) -> None:
    """Train the pair. SIGTERM stops it at the next step, with a checkpoint for --resume."""
    from triforce_tools.demo_training.card import write_card
    from triforce_tools.demo_training.evaluate import evaluate
    from triforce_tools.demo_training.export import export_pair
    from triforce_tools.demo_training.train import train

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    done = train(settings, resume=resume, minutes=minutes, device=device, threads=threads, stop=stop)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # from here on it ends the command, as elsewhere
    if done and not stop.is_set() and export_to is not None:
        export_pair(settings, export_to)
        write_card(export_to, evaluate(export_to, settings, device=device, threads=threads))


@demo_app.command()
@with_options_of(demo_settings)
def export(
    settings: DemoSettings, folder: Annotated[Path, typer.Argument(file_okay=False, help="folder to write")]
) -> None:
    """Write the newest checkpoints as plain transformers folders."""
    from triforce_tools.demo_training.export import export_pair

    export_pair(settings, folder)


@demo_app.command()
def evaluate(
    weights: WeightsArgument = None,
    settings_file: SettingsOption = DEFAULT_SETTINGS,
    cache_dir: CacheDirOption = None,
    context: Annotated[
        int | None, typer.Option(min=256, help="longest window in tokens; by default that of the model card")
    ] = None,
    card: Annotated[bool, typer.Option("--card", help="write card and figures beside the weights")] = False,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "auto",
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a pair on held-out files and fresh recall tasks."""
    from triforce_tools.demo_training.card import write_card
    from triforce_tools.demo_training.evaluate import EvaluationPlan, evaluate

    weights = weights or weights_dir("target").parent
    settings = load_settings(settings_file, cache_dir=cache_dir, tokenizer=weights / "target" / "tokenizer.json")
    plan = EvaluationPlan() if context is None else EvaluationPlan.of_context(context)
    console = Console(stderr=True)
    figures = evaluate(weights, settings, plan, device=device, dtype=dtype, threads=threads, console=console)
    if card:
        write_card(weights, figures)
    show_figures(figures, as_json=as_json)


@demo_app.command()
def acceptance(
    weights: WeightsArgument = None,
    settings_file: SettingsOption = DEFAULT_SETTINGS,
    cache_dir: CacheDirOption = None,
    documents: Annotated[int, typer.Option(min=1, help="held-out files")] = 20,
    context: Annotated[int, typer.Option(min=2560, help="tokens of each file")] = 8192,
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Compare the acceptance that shared noise and classical rejection give at several temperatures."""
    from triforce_tools.demo_training.evaluate import compare_rules

    weights = weights or weights_dir("target").parent
    settings = load_settings(settings_file, cache_dir=cache_dir, tokenizer=weights / "target" / "tokenizer.json")
    show_figures(compare_rules(weights, settings, documents=documents, context=context, dtype=dtype), as_json=as_json)
