"""Sends the requests of a file through whatever openai-python runs this, whole and streamed, and prints the answers.

python ask_openai.py BASE_URL MODEL FILE [EXTRA FIELDS AS JSON]
"""

from __future__ import annotations

import json
import sys
from typing import Any

from openai import OpenAI


def choices_of(answer: Any) -> dict[str, Any]:
    """The fields of an answer that another client must get too."""
    dumped = answer.to_dict()
    return {"choices": dumped["choices"], "usage": dumped["usage"]}


def main(base_url: str, model: str, file: str, more: str = "{}") -> None:
    client = OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120)
    with open(file) as opened:
        cases = json.load(opened)
    found = {}
    for name, case in cases.items():
        create = {"completions": client.completions.create, "chat": client.chat.completions.create}[case["route"]]
        extra = case.get("extra", {}) | json.loads(more)
        whole = create(model=model, **case["body"], extra_body=extra)
        options = {"include_usage": True}
        chunks = create(model=model, **case["body"], extra_body=extra, stream=True, stream_options=options)
        found[name] = {"whole": choices_of(whole), "chunks": [chunk.to_dict() for chunk in chunks]}
    json.dump(found, sys.stdout)


main(*sys.argv[1:])
