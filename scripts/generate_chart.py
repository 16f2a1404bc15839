"""`python -m scripts.generate_chart` writes what the Helm chart k8s/triforce has from scripts/chart_values.py and the
settings: values.yaml, values.schema.json, the table of values in its README, and what `triforce serve` sets for Ray. A
test fails where they are stale.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deploy.app import ENVIRONMENT
from scripts.chart_values import ChartValues, Pod, Resources
from triforce_core.config import Settings

REPOSITORY = Path(__file__).resolve().parent.parent
CHART = REPOSITORY / "k8s" / "triforce"
BEGIN, END = "<!-- values: generated from scripts/chart_values.py -->\n", "<!-- end of values -->\n"
WIDTH = 110
ONE_MACHINE = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "SPT_NOENV")  # what only `triforce serve` needs


def schema() -> dict[str, Any]:
    """The JSON Schema of the values, in draft 7, which every Helm 3 understands."""
    found = draft_7(ChartValues.model_json_schema())
    assert isinstance(found, dict)
    for model in [found, *(found["definitions"][each.__name__] for each in sections(ChartValues))]:
        # Helm takes a null for "without the default", and templates would then fail without a name.
        model["required"] = [name for name in model["properties"] if name != "global"]
    return {"$schema": "http://json-schema.org/draft-07/schema#", **found}


def sections(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """The models of the sections of values.yaml."""
    for info in model.model_fields.values():
        if section := nested(info):
            yield section
            yield from sections(section)


def draft_7(node: Any) -> Any:
    """The schema without what later drafts have, without titles and defaults, and with `type: [x, "null"]` in place of
    `anyOf`, because Helm's messages then say what is allowed.
    """
    if isinstance(node, list):
        return [draft_7(each) for each in node]
    if not isinstance(node, dict):
        return node.replace("#/$defs/", "#/definitions/") if isinstance(node, str) else node
    kept: dict[str, Any] = {}
    for key, value in node.items():
        if key in ("default", "title") and not isinstance(value, dict):
            continue
        if key == "default":
            continue
        if key == "properties":
            kept[key] = {name: draft_7(each) for name, each in value.items()}
        else:
            kept[{"$defs": "definitions", "prefixItems": "items"}.get(key, key)] = draft_7(value)
    options = kept.get("anyOf", [])
    if len(options) == 2 and options[1] == {"type": "null"} and "type" in options[0]:
        only = kept.pop("anyOf")[0]
        kept |= only | {"type": [only["type"], "null"]}
        if "enum" in only:
            kept["enum"] = [*only["enum"], None]
    return kept


def nested(info: FieldInfo) -> type[BaseModel] | None:
    """The model of a section whose values are listed one by one; otherwise None."""
    model = info.annotation
    if isinstance(model, type) and issubclass(model, BaseModel) and model not in (Settings, Pod, Resources):
        return model
    return None


def fields(defaults: BaseModel) -> Iterator[tuple[str, FieldInfo, Any]]:
    """Name, description and default of each value."""
    for name, info in type(defaults).model_fields.items():
        if info.alias is None:
            yield name, info, getattr(defaults, name)


def values_yaml() -> str:
    lines = [
        "# The chart's values with their defaults. Generated from scripts/chart_values.py. `helm install` checks given",
        "# values against values.schema.json; examples/ has sets of values that work.",
    ]
    lines += lines_of(ChartValues(), "")
    return "\n".join(lines) + "\n"


def lines_of(defaults: BaseModel, indent: str) -> Iterator[str]:
    for name, info, value in fields(defaults):
        model = nested(info)
        about = info.description or (model.__doc__ if model and model.__doc__ else "")
        if not indent:
            yield ""
        for line in textwrap.wrap(" ".join(about.split()), WIDTH - len(indent)):
            yield f"{indent}# {line}"
        if model:
            yield f"{indent}{name}:"
            yield from lines_of(value, indent + "  ")
        else:
            yield f"{indent}{name}: {json.dumps(plain(value))}"


def plain(value: Any) -> Any:
    """A value as JSON has it; of the settings, and of pods that differ from others, what is set."""
    if isinstance(value, Resources):
        return value.model_dump()
    return value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value


def table() -> str:
    rows = ["| value | default | what it is |", "| --- | --- | --- |"]
    for path, info, value in listed(ChartValues(), ""):
        rows.append(f"| `{path}` | `{json.dumps(plain(value))}` | {info.description or ''} |".replace("|  |", "| |"))
    return "\n".join(rows) + "\n"


def listed(defaults: BaseModel, prefix: str) -> Iterator[tuple[str, FieldInfo, Any]]:
    for name, info, value in fields(defaults):
        if nested(info) and isinstance(value, BaseModel):
            yield from listed(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info, value


def readme(present: str) -> str:
    """The chart's README with the table of values renewed."""
    before, _, rest = present.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{CHART / 'README.md'} must have the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def environment() -> str:
    """The environment of `triforce serve`, as that of a container."""
    named = ({"name": name, "value": value} for name, value in ENVIRONMENT.items() if name not in ONE_MACHINE)
    return "".join(f"- {json.dumps(each)}\n" for each in named)


def generated() -> dict[str, str]:
    """What each generated file of the chart should hold."""
    return {
        "values.yaml": values_yaml(),
        "values.schema.json": json.dumps(schema(), indent=1) + "\n",
        "files/environment.yaml": environment(),
        "README.md": readme((CHART / "README.md").read_text(encoding="utf-8")),
    }


def main() -> None:
    for name, text in generated().items():
        (CHART / name).write_text(text, encoding="utf-8")
    assert yaml.safe_load(values_yaml())


if __name__ == "__main__":
    main()
