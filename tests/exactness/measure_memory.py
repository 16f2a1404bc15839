"""Run in a process of its own: three-tier decoding at a long context, and what it took at its peak, as JSON.

python -m tests.exactness.measure_memory TARGET DRAFTER DTYPE CONTEXT
"""

from __future__ import annotations

import json
import re
import sys
import sysconfig
from pathlib import Path

from triforce_core.building.assembly import local_engine
from triforce_core.config import Settings
from triforce_core.engine.engine import run_to_end
from triforce_core.engine.sequence import Request
from triforce_core.kv.base import KVCache
from triforce_core.messages import SamplingParams
from triforce_core.models.files import load_tokenizer
from triforce_core.models.load import load_model
from triforce_core.speculation.decoder import SpeculativeDecoder
from triforce_core.speculation.leaf import Leaf
from triforce_core.speculation.verification import ModelVerifier

NUM_TOKENS = 64
FILES = ["inspect.py", "turtle.py", "tarfile.py", "doctest.py"]


def memory(field: str) -> int:
    """VmRSS (now) or VmHWM (the most so far) of this process, bytes."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) * 1024


def caches(decoder: SpeculativeDecoder) -> list[KVCache]:
    """The caches of all tiers, from the top."""
    assert isinstance(decoder.verifier, ModelVerifier)
    below = decoder.proposer
    if isinstance(below, SpeculativeDecoder):
        return [decoder.verifier.runner.kv, *caches(below)]
    assert isinstance(below, Leaf)
    assert below.runner is not None
    return [decoder.verifier.runner.kv, below.runner.kv]


def main(target_dir: str, drafter_dir: str, dtype: str, context: int) -> None:
    imported = memory("VmRSS")
    tokenizer = load_tokenizer(target_dir)
    texts = [Path(sysconfig.get_paths()["stdlib"], file).read_text() for file in FILES]
    prompt = tuple(tokenizer.encode("\n".join(texts), add_special_tokens=False)[: context - NUM_TOKENS])
    assert len(prompt) == context - NUM_TOKENS
    settings = Settings.model_validate(
        {"dtype": dtype, "max_sequences": 1, "target": {"context_length": context, "kv_pool_tokens": context}}
    )
    target, drafter = (load_model(d, r, dtype, "cpu") for d, r in ((target_dir, "target"), (drafter_dir, "drafter")))
    engine = local_engine(target, drafter, settings)
    outputs = list(run_to_end(engine, [Request(prompt, NUM_TOKENS, SamplingParams(), 1, (8, 3))]))
    assert isinstance(engine.decoder, SpeculativeDecoder)
    pools = [pool for kv in caches(engine.decoder) for pool in (*kv.keys, *kv.values)]
    weights = [weight for model in (target, drafter) for weight in model.parameters()]
    report = {
        "imported": imported,
        "peak": memory("VmHWM"),
        "kv": sum(t.nbytes for t in pools),
        "weights": sum(t.nbytes for t in weights),
        "tokens": sum(len(o.tokens) for o in outputs),
        "accepted": outputs[-1].stats.tallies[0].accepted,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
