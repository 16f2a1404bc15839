"""Our engine, with all tiers in one process, behind the plainest server: what `triforce serve` adds is the difference.

python -m triforce_tools.peers.engine_server DTYPE PORT [SETTINGS]
"""

from __future__ import annotations

import sys
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from triforce_core.building.loading import load_local_engine
from triforce_core.config import load_settings
from triforce_core.engine.engine import Engine, run_to_end
from triforce_core.engine.sequence import Request
from triforce_core.machine.threads import apart
from triforce_core.messages import SamplingParams
from triforce_tools.peers.transformers_server import Handler


class Decoding(Handler):
    engine: Engine

    def decode(self, asked: dict[str, Any]) -> None:
        speculation = asked["speculation"]
        request = Request(
            prompt=tuple(asked["prompt"]),
            max_tokens=asked["max_tokens"],
            sampling=SamplingParams(temperature=asked["temperature"]),
            seed=asked["seed"],
            lookaheads=speculation and tuple(speculation["lookaheads"]),
            cache_salt=asked["cache_salt"],
        )
        for output in run_to_end(self.engine, [request]):
            if output.tokens:
                self.tell(*output.tokens)


if __name__ == "__main__":
    dtype, port, *config = sys.argv[1:]
    settings = load_settings(*map(Path, config), dtype=dtype)
    Decoding.engine = apart(lambda: load_local_engine(settings))
    ThreadingHTTPServer(("127.0.0.1", int(port)), Decoding).serve_forever()
