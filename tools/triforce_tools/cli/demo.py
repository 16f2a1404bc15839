"""`triforce demo`: train and export the demo pair."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from triforce_tools.cli.options import ThreadsOption
from triforce_tools.demo_training.settings import DEFAULT_SETTINGS, load_settings

SettingsOption = Annotated[
    Path,
    typer.Option("--settings", help="YAML file of seed, shapes and stages", show_default="demo_training/train.yaml"),
]

demo_app = typer.Typer(no_args_is_help=True, help="Train and export the demo pair.")


@demo_app.command()
def train(
    settings: SettingsOption = DEFAULT_SETTINGS,
    resume: Annotated[bool, typer.Option("--resume", help="continue the run in the cache folder")] = False,
    minutes: Annotated[float | None, typer.Option(min=0, help="stop after this time, with a checkpoint")] = None,
    device: Annotated[str, typer.Option(help="cpu | cuda | cuda:N")] = "cpu",
    threads: ThreadsOption = None,
) -> None:
    """Train the pair. Whatever ends it, --resume goes on from the latest checkpoint."""
    from triforce_tools.demo_training.train import train

    train(load_settings(settings), resume=resume, minutes=minutes, device=device, threads=threads)


@demo_app.command()
def export(
    folder: Annotated[Path, typer.Argument(file_okay=False, help="folder to write")],
    settings: SettingsOption = DEFAULT_SETTINGS,
) -> None:
    """Write the newest checkpoints as plain transformers folders, with a model card."""
    from triforce_tools.demo_training.export import export_pair

    export_pair(load_settings(settings), folder)
