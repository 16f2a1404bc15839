"""`triforce doctor`: makes the checks of a start, and prints what each found."""

import json

import typer

from actors.colocation import arranged
from deploy.cli.options import JsonOption, serving_settings, with_options_of
from triforce_core.config import Settings
from triforce_core.errors import TriForceError, reason_of


@with_options_of(serving_settings)
def doctor(settings: Settings, as_json: JsonOption = False) -> None:
    """Make all the checks with which `triforce serve` begins, and one of memory. Nothing is started.

    The exit code is 1 if there is a problem.
    """
    from deploy.checks import CHECKS, memory

    settings = arranged(settings)
    checks, problems = [], 0
    for name, check in (CHECKS | {"memory": memory}).items():
        try:
            status, found = "ok", check(settings)
        except TriForceError as error:  # the message names field, value and rule
            status, found = "problem", str(error)
        except Exception as error:
            status, found = "problem", f"this could not be checked: {type(error).__name__}: {reason_of(error)}"
        problems += status == "problem"
        checks.append({"name": name, "status": status, "found": found})
        if not as_json:
            typer.echo(f"{status:9}{name:12}{found}")
    if as_json:
        typer.echo(json.dumps({"problems": problems, "checks": checks}))
    raise typer.Exit(1 if problems else 0)
