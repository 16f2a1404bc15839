"""Installs the packages of requirements.lock, and this project with its demo pair and tools, into the environment of
the Python that runs this.

uv installs where it can, in a fraction of pip's time. uv reads none of pip's settings, so this script passes them on.
It also checks that uv would install the same build of torch as pip: CPU and CUDA builds share a version and differ by
gigabytes. Otherwise pip installs, with the same arguments.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
LOCK = "requirements.lock"
STEPS = (
    ["--requirement", LOCK],
    ["--no-deps", "--no-build-isolation", "--editable", ".", "--editable", "./demo_weights", "--editable", "./tools"],
)

PIP = [sys.executable, "-m", "pip"]
# A second --quiet hides warnings but not errors: pip warns about each package that an extra index does not have.
BY_PIP = [*PIP, "install", "--quiet", "--quiet"]
UV = "uv>=0.8"

# pip's settings, and the environment variables by which uv knows them. pip separates the items of a list by blanks.
TOLD_UV = {
    "index-url": "UV_INDEX_URL",
    "extra-index-url": "UV_EXTRA_INDEX_URL",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
# Settings that do not affect which packages are installed. With any other setting, pip installs.
OF_NO_CONCERN = {
    "break-system-packages",
    "cache-dir",
    "config-file",  # the file that the other settings come from
    "disable-pip-version-check",
    "log",
    "no-cache-dir",
    "no-color",
    "no-input",
    "no-warn-script-location",
    "progress-bar",
    "quiet",
    "require-virtualenv",
    "retries",
    "root-user-action",
    "verbose",
}


class UvDoesNotDoError(Exception):
    """The reason why pip has to install."""


def pip_settings(listed: str) -> dict[str, str]:
    """The settings in the output of `pip config list`, as `pip install` applies them: [install] overrides [global], and
    the environment overrides both.
    """
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in sections:
            sections[section][name] = str(ast.literal_eval(value))
    return sections["global"] | sections["install"] | sections[":env:"]


def uv_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that make uv search where pip searches, and take the best version of all indexes like pip.

    Raises `UvDoesNotDoError` for a setting that uv has no equivalent of.
    """
    if unknown := sorted(settings.keys() - TOLD_UV.keys() - OF_NO_CONCERN):
        raise UvDoesNotDoError(f"pip's {', '.join(unknown)} cannot be passed on")
    told = {variable: " ".join(settings[name].split()) for name, variable in TOLD_UV.items() if name in settings}
    if "UV_FIND_LINKS" in told:
        told["UV_FIND_LINKS"] = told["UV_FIND_LINKS"].replace(" ", ",")
    return {"UV_INDEX_STRATEGY": "unsafe-best-match"} | told


def output_of(command: list[str], variables: Mapping[str, str], given: str = "") -> str:
    """The standard output of a command. Raises `UvDoesNotDoError` if the command fails."""
    done = subprocess.run(
        command,
        input=given,
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | variables,
        check=False,
    )
    if done.returncode:
        words = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"exit {done.returncode}")
        raise UvDoesNotDoError(f"{Path(command[0]).name}: {words.strip()}")
    return done.stdout


def torch_of_pip(locked: str, settings: Mapping[str, str]) -> str:
    """The version and build of torch that pip would install: the highest build of the locked version."""
    as_variables = {f"PIP_{name.upper().replace('-', '_')}": value for name, value in settings.items()}
    printed = output_of([*PIP, "index", "versions", "torch"], as_variables)
    offered = re.findall(r"^Available versions: (.*)$", printed, re.MULTILINE)
    builds = [version for version in ", ".join(offered).split(", ") if version.partition("+")[0] == locked]
    return builds[0] if builds else "none"


def torch_of_uv(uv: str, locked: str, variables: Mapping[str, str]) -> str:
    """The version and build of torch that uv would install into an empty environment."""
    resolve = [uv, "pip", "compile", "--quiet", "--no-deps", "--no-header", "--no-annotate", "--python", sys.executable]
    return output_of([*resolve, "-"], variables, f"torch=={locked}").strip().removeprefix("torch==")


def prepare_uv() -> tuple[str, dict[str, str]]:
    """The path of uv, and the environment variables with which uv installs what pip would install."""
    settings = pip_settings(output_of([*PIP, "config", "list"], {}))
    variables = uv_settings(settings)
    beside = Path(sys.executable).with_name("uv")
    if not beside.exists():
        output_of([*BY_PIP, UV], {})
    locked = re.findall(r"^torch==(\S+)$", (REPOSITORY / LOCK).read_text(), re.MULTILINE)[0]
    ours, theirs = torch_of_uv(str(beside), locked, variables), torch_of_pip(locked, settings)
    if ours != theirs:
        raise UvDoesNotDoError(f"it would take torch {ours}, pip {theirs}")
    return str(beside), variables


def main() -> None:
    try:
        uv, variables = prepare_uv()
        by_uv = [uv, "pip", "install", "--quiet", "--python", sys.executable]
        for step in STEPS:
            output_of([*by_uv, *step], variables)
    except (UvDoesNotDoError, OSError) as reason:
        print(f"pip installs, which takes minutes; uv would be faster, but: {reason}", flush=True)
        for step in STEPS:
            if code := subprocess.run([*BY_PIP, *step], cwd=REPOSITORY, check=False).returncode:
                raise SystemExit(code) from None


if __name__ == "__main__":
    main()
