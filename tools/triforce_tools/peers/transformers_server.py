"""transformers' own `generate` behind `/v1/completions`, since `transformers serve` takes chats only.

    python transformers_server.py MODEL DTYPE PORT [lookup | DRAFTER]

With `lookup` its prompt lookup drafts, or else a model, with the numbers of tokens that transformers chooses.

A program that imports nothing of this project, so that it can run in an environment of its own. Each prompt is read
anew.
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import AutoModelForCausalLM, set_seed
from transformers.generation.streamers import BaseStreamer


class Handler(BaseHTTPRequestHandler):
    """Streams what `decode` tells, one request at a time; others wait."""

    one_at_a_time = threading.Lock()
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """`/health` and `/v1/models`."""
        models = json.dumps({"object": "list", "data": [{"id": "model", "object": "model"}]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(models)))
        self.end_headers()
        self.wfile.write(models)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        with self.one_at_a_time:
            self.decode(asked)
        read, made = len(asked["prompt"]), asked["max_tokens"]
        self._send([], {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made})
        self.wfile.write(b"data: [DONE]\n\n")

    def decode(self, asked: dict[str, Any]) -> None:
        """Decode the request, whose output has no end of its own, and `tell` of its tokens as they come."""
        raise NotImplementedError

    def tell(self, *tokens: int) -> None:
        text = "".join(f"{token} " for token in tokens)
        self._send([{"index": 0, "text": text, "logprobs": None, "finish_reason": None}])

    def _send(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> None:
        head = {"id": "one", "object": "text_completion", "created": 0, "model": "model"}
        self.wfile.write(b"data: " + json.dumps(head | {"choices": choices, "usage": usage}).encode() + b"\n\n")

    def log_message(self, *of: Any) -> None:
        """Say nothing."""


class Generating(Handler):
    model: Any
    speculation: dict[str, Any]  # arguments of `generate`

    def decode(self, asked: dict[str, Any]) -> None:
        prompt, count, temperature = asked["prompt"], asked["max_tokens"], asked["temperature"]
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        set_seed(asked["seed"])
        self.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=count,
            min_new_tokens=count,
            streamer=Told(self.tell),
            **sampling,
            **self.speculation,
        )


class Told(BaseStreamer):
    """Tells of the tokens after the prompt."""

    def __init__(self, tell: Any) -> None:
        self.tell, self.prompt_read = tell, False

    def put(self, value: torch.Tensor) -> None:
        if self.prompt_read:
            self.tell(*value.flatten().tolist())
        self.prompt_read = True

    def end(self) -> None:
        """What comes last is told after `generate`."""


if __name__ == "__main__":
    path, dtype, port, *drafting = sys.argv[1:]
    Generating.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    if drafting == ["lookup"]:
        Generating.speculation = {"prompt_lookup_num_tokens": 10}
    elif drafting:
        Generating.speculation = {"assistant_model": AutoModelForCausalLM.from_pretrained(*drafting, dtype=dtype)}
    else:
        Generating.speculation = {}
    ThreadingHTTPServer(("127.0.0.1", int(port)), Generating).serve_forever()
