"""A chat through LangChain's ChatOpenAI: invoked, streamed, and with a form for the output. Prints what came.

python ask_langchain.py BASE_URL MODEL
"""

from __future__ import annotations

import json
import sys

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI

base_url, model = sys.argv[1:]
chat = ChatOpenAI(base_url=base_url, api_key="none", model=model, temperature=0.7, seed=5, max_completion_tokens=24)
messages = [SystemMessage("Write Python."), HumanMessage("import os")]
point = {
    "title": "point",
    "type": "object",
    "properties": {"x": {"type": "integer", "maximum": 99}},
    "required": ["x"],
    "additionalProperties": False,
}
answer = chat.invoke(messages)
found = {
    "invoked": answer.content,
    "usage": answer.usage_metadata,
    "streamed": "".join(str(chunk.content) for chunk in chat.stream(messages)),
    "batched": [each.content for each in chat.batch([messages, messages])],
    "object": chat.with_structured_output(point, method="json_schema").invoke(messages),
}
json.dump(found, sys.stdout)
