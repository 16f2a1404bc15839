"""deploy/Dockerfile and .dockerignore as an engine reads them: the files that the engine is sent, and an image's steps
and configuration. Only the instructions that occur there are known here.
"""

from __future__ import annotations

import json
import re
import shlex
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

REPOSITORY = Path(__file__).resolve().parents[1]
DOCKERFILE = REPOSITORY / "deploy/Dockerfile"
PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"  # of the official Python images


@dataclass(frozen=True)
class Step:
    """An instruction and its text."""

    name: str
    text: str

    @property
    def options(self) -> dict[str, str]:
        """The options before the instruction's arguments, such as `--from=stage`."""
        return dict(re.findall(r"--([\w-]+)=(\S+)", self.text[: len(self.text) - len(self.rest)]))

    @property
    def rest(self) -> str:
        """The text without its options."""
        return re.sub(r"^(--[\w-]+=\S+\s+)*", "", self.text)


@dataclass
class Image:
    """What a stage leaves behind, for whoever runs it."""

    external: str  # the image that it stands on
    steps: list[Step] = field(default_factory=list)  # from there on
    args: dict[str, str] = field(default_factory=dict)  # of the last stage
    env: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    labels: dict[str, str] = field(default_factory=dict)
    user: str = "root"
    workdir: str = "/"
    ports: list[int] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    cmd: list[str] = field(default_factory=list)
    health_command: list[str] = field(default_factory=list)


def read_steps() -> list[Step]:
    without_comments = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", without_comments).splitlines()
    return [Step(*line.split(maxsplit=1)) for line in lines if line.strip()]


def image(variant: str, stage: str = "") -> Image:
    """The image that the file gives for this VARIANT, or the image of one of its stages."""
    # The ARGs before the first stage. FROM lines can use them, and so can each stage that names them again.
    everywhere: dict[str, str] = {}
    stages: dict[str, Image] = {}
    name = ""
    for step in read_steps():
        if step.name == "ARG" and not stages:
            everywhere |= pairs(step.text) | {"VARIANT": variant}
        elif step.name == "FROM":
            base, _, name = Template(step.text).substitute(everywhere).partition(" AS ")
            stages[name] = deepcopy(stages.get(base, Image(base)))
            stages[name].args = {}
        else:
            apply(stages[name], step, everywhere)
    return stages[stage]


def apply(stage: Image, step: Step, everywhere: dict[str, str]) -> None:
    # A shell replaces the variables of RUN.
    text = step.text if step.name == "RUN" else Template(step.text).safe_substitute(stage.env | stage.args)
    stage.steps.append(Step(step.name, text))
    match step.name:
        case "ARG":
            name, _, default = text.partition("=")
            stage.args[name] = everywhere.get(name, default)
        case "ENV":
            stage.env |= pairs(text)
        case "LABEL":
            stage.labels |= pairs(text)
        case "USER":
            stage.user = text
        case "WORKDIR":
            stage.workdir = text
        case "EXPOSE":
            stage.ports = [int(port) for port in text.split()]
        case "ENTRYPOINT":
            stage.entrypoint = json.loads(text)
        case "CMD":
            stage.cmd = json.loads(text)
        case "HEALTHCHECK":
            stage.health_command = json.loads(text.partition(" CMD ")[2])
        case other:
            assert other in ("RUN", "COPY"), f"{other} is not known here"


def pairs(text: str) -> dict[str, str]:
    return dict(each.split("=", 1) for each in shlex.split(text))


def in_context(path: str) -> bool:
    """Whether .dockerignore lets a file or a folder be sent to the engine. The last line that names the path, or a
    folder above it, decides.
    """
    sent = True
    parts = path.split("/")
    named = ["/".join(parts[: n + 1]) for n in range(len(parts))]
    for line in (REPOSITORY / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern = re.escape(line.removeprefix("!")).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
            if any(re.fullmatch(pattern, each) for each in named):
                sent = line.startswith("!")
    return sent


def context(folder: Path = REPOSITORY) -> list[str]:
    """The paths of all files that are sent to the engine. Folders that are not sent are not searched, because
    .dockerignore sends no file from within them.
    """
    found = []
    for each in sorted(folder.iterdir()):
        path = str(each.relative_to(REPOSITORY))
        if in_context(path):
            found += context(each) if each.is_dir() else [path]
    return found
