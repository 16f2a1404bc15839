"""All commands of `triforce`. Heavy imports wait until a command needs them; an error is one line and exit code 2."""

import json
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer
import yaml

import triforce_core
from actors.colocation import arranged
from deploy.cli.chat import chat
from deploy.cli.doctor import doctor
from deploy.cli.generate import generate
from deploy.cli.options import ConfigOption, JsonOption, serving_settings, with_options_of
from triforce_core.config import Settings, load_settings
from triforce_core.errors import InvalidValueError, TriForceError
from triforce_core.models.precision import resolved

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
app.command()(chat)
app.command()(doctor)
app.command()(generate)

TOOLS = ("bench", "demo", "eval")
ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True}

# The base class of all usage errors, from the version of click that typer uses.
UsageError: Any = typer.BadParameter.__bases__[0]


def print_version(asked: bool) -> None:
    if asked:
        typer.echo(triforce_core.__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="print the version and exit", callback=print_version, is_eager=True)
    ] = False,
) -> None:
    """Serve, try and measure a model with hierarchical speculative decoding."""


@app.command()
def config(
    config: ConfigOption = None,
    as_json: JsonOption = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="print instead the JSON schema of a settings file, for editors and charts")
    ] = False,
) -> None:
    """Print all settings with the defaults filled in, and `auto` resolved for this machine."""
    if schema:
        typer.echo(json.dumps(Settings.model_json_schema(), indent=2))
        return
    found = arranged(resolved(load_settings(config)))
    if found.target.lossy:
        typer.echo(f"# lossy: {found.target.lossy}", err=as_json)  # JSON has no comments
    settings = found.model_dump(mode="json")
    typer.echo(json.dumps(settings) if as_json else yaml.safe_dump(settings, sort_keys=False), nl=as_json)


@app.command()
@with_options_of(serving_settings)
def serve(settings: Settings) -> None:
    """Serve the three tiers as Ray actors behind an OpenAI-compatible endpoint."""
    from deploy.app import run

    run(settings)


def add_tools() -> None:
    """Add the commands of another distribution, of folder tools/. Where it is not installed, or is of another version
    and cannot be loaded, each says how to install it; the other commands do not need it.
    """
    found = {entry.name: entry for entry in entry_points(group="triforce.commands")}
    for name in TOOLS:
        try:
            command = found[name].load()
        except (KeyError, ImportError, AttributeError) as error:
            reason = "" if name not in found else f" of this version: {error}"
            rule = f"is one of the tools: pip install 'triforce-serve[tools]'{reason}"
            app.command(name, help=f"Not installed: it {rule}", context_settings=ANYTHING)(refusal(name, rule))
        else:
            if isinstance(command, typer.Typer):
                app.add_typer(command, name=name)
            else:
                app.command(name)(command)


def refusal(name: str, rule: str) -> Callable[[], None]:
    def refuse() -> None:
        raise InvalidValueError("command", name, rule)

    return refuse


add_tools()


def main() -> None:
    """The entry point. A user's mistake gives one line on standard error and exit code 2; an interrupt gives 130."""
    try:
        exit_code = app(standalone_mode=False)
    except UsageError as error:
        message = error.format_message()
    except TriForceError as error:
        message = str(error)
    else:
        sys.exit(exit_code)
    typer.echo(f"triforce: {message}", err=True)
    sys.exit(2)
