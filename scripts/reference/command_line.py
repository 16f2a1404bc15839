"""The page of all commands and options, from the typer application."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer.main

from scripts.reference.markdown import code, sentence, table
from triforce_core.cli.app import app


def page() -> str:
    intro = (
        "For users of the command `triforce`: every command with its options.\n\n`triforce COMMAND --help`"
        " prints the same, and `triforce --version` the version. A mistake gives one line on standard error and exit"
        " code 2; an interrupt gives 130.\n"
    )
    commands: Any = typer.main.get_command(app)
    return "\n".join(["# Command line\n", intro, *commands_of(commands, "triforce")])


def commands_of(command: Any, name: str) -> Iterator[str]:
    """The command and those below it, each as a heading, what it does, and its arguments and options."""
    if hasattr(command, "commands"):
        for sub in command.commands.values():
            yield from commands_of(sub, f"{name} {sub.name}")
        return
    context = command.make_context(name, [], resilient_parsing=True)
    yield f"## `{name}`\n"
    yield sentence(command.help) + "\n"
    yield table(("option", "meaning"), [record_of(parameter, context) for parameter in command.params])


def record_of(parameter: Any, context: Any) -> tuple[str, str]:
    option, meaning = parameter.get_help_record(context)
    return code(option), " ".join(meaning.split())
