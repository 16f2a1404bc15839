"""`python -m scripts.chart_schema` renews the settings in the Helm chart's values.schema.json; a test fails where they
are stale. The rest of that file, like values.yaml, is written by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from triforce_core.config import Settings

SCHEMA = Path(__file__).resolve().parent.parent / "k8s" / "triforce" / "values.schema.json"
RENAMED = {"$defs": "definitions", "prefixItems": "items"}  # later drafts' names for what draft 7 has


def renewed(present: str) -> str:
    """The schema of the values with the present settings."""
    schema = json.loads(present)
    schema["definitions"]["Settings"] = draft_7(Settings.model_json_schema())
    return json.dumps(schema, indent=1) + "\n"


def draft_7(node: Any) -> Any:
    """The schema in draft 7, which every Helm 3 understands, without titles and defaults, and with
    `type: [x, "null"]` in place of `anyOf`, because Helm's messages then say what is allowed.
    """
    if isinstance(node, list):
        return [draft_7(each) for each in node]
    if isinstance(node, str):
        return node.replace("#/$defs/", "#/definitions/Settings/definitions/")
    if not isinstance(node, dict):
        return node
    kept = {RENAMED.get(key, key): draft_7(value) for key, value in node.items() if key not in ("default", "title")}
    match kept.get("anyOf"):
        case [{"type": kind} as only, {"type": "null"}]:
            del kept["anyOf"]
            kept |= only | {"type": [kind, "null"]}
            if "const" in only:
                kept["enum"] = [kept.pop("const"), None]
            if "enum" in only:
                kept["enum"] = [*only["enum"], None]
    return kept


if __name__ == "__main__":
    SCHEMA.write_text(renewed(SCHEMA.read_text(encoding="utf-8")), encoding="utf-8")
