"""The served path on one GPU: target, self-drafter and drafter as three Ray actors that share the card, over gRPC.

    python -m scripts.gpu_served OUT.json [--device cuda] [--dtype float32] [--geometry llama-1b|PATH|none] [--layers N]
        [--no-demo] [--measured-pool]

First with the demo pair, then with random weights of a geometry: the local engine and the actors decode the same four
requests together, plainly and with speculation, and all tokens are compared. Then the retrieval tier's process is
killed while they decode. OUT.json is written after each part. The exit status is 1 if a part failed or if tokens differ
in float32; in 16 bits ties may part, and the share of equal tokens is only reported.

Memory: Ray's shares decide which processes share the card, and limit nothing. Each process takes its context, its
weights (target and self-drafter each have a copy), its KV, which is small here, and what its passes need. It checks for
room against what is free while the others load too, so the card needs more than all take together: for llama-1b in
float32 some 20 GiB. The local engine is freed before.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
import traceback
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch

from deploy.app import prepare_environment
from deploy.remains import nothing_remains
from scripts.gpu_check import save
from triforce_core.building.loading import load_local_engine
from triforce_core.config import Settings, load_settings
from triforce_core.engine.engine import run_to_end
from triforce_core.engine.sequence import Request
from triforce_core.messages import SamplingParams, Tier
from triforce_core.models.files import load_config, load_tokenizer
from triforce_tools.bench.geometry import geometry_of, random_model
from triforce_tools.bench.prompts import held_out_tokens

PLANS = {"plain": (0, 0), "speculative": (8, 3)}
TWICE = (*PLANS, *PLANS)  # the first run of a plan makes kernels; what the second takes is reported
LLAMA_1B = {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64}  # else as the 8B
DRAFTER = {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 256, "head_dim": 64} | dict.fromkeys(
    ("num_attention_heads", "num_key_value_heads"), 2
)
REQUESTS, PROMPT, OUTPUT, KILLED_AFTER, BACK_WITHIN_S = 4, 400, 64, 16, 120.0
SMALL: dict[str, Any] = {
    "max_sequences": REQUESTS,
    "retrieval": {"budget": 128, "refresh_every": 32},
    "placement": {"target": {"gpus": 0.5}, "retrieval": {"gpus": 0.4}, "draft": {"gpus": 0.1}},
}
POOL = {"kv_pool_tokens": 4096, "context_length": 2048, "prefill_chunk": 512}
Put = Callable[[str, Any], Any]  # writes a result and returns it
Decoded = list[list[tuple[Any, bytes, Any]]]  # of each request: tokens, which tiers drew them, and statistics


def random_pair(args: Namespace, folder: str) -> tuple[str, str]:
    """Checkpoints with random weights, which the actors load like any others."""
    own = args.geometry == "llama-1b"
    shapes = geometry_of("llama-3.1-8b" if own else args.geometry)
    changed = LLAMA_1B | {"tie_word_embeddings": True} if own else {}
    for name, value in (changed | ({"num_hidden_layers": args.layers} if args.layers else {})).items():
        setattr(shapes.target, name, value)
    for name, value in DRAFTER.items():
        setattr(shapes.drafter, name, value)
    for role, config in (("target", shapes.target), ("draft", shapes.drafter)):
        random_model(config, load_settings(device=args.device, dtype="bfloat16")).save_pretrained(f"{folder}/{role}")
    return f"{folder}/target", f"{folder}/draft"


def requests_of(model: str, plan: str) -> list[Request]:
    """Half of them are greedy. The demo pair gets text that it never saw, random weights get drawn tokens."""
    if model == "demo":
        prompts = [held_out_tokens(load_tokenizer(model), PROMPT + n, n) for n in range(REQUESTS)]
    else:
        vocabulary = range(load_config(model, "target").vocab_size)
        prompts = [Random(n).choices(vocabulary, k=PROMPT + n) for n in range(REQUESTS)]
    return [Request(tuple(p), OUTPUT, SamplingParams(0.8 * (n % 2)), n, PLANS[plan]) for n, p in enumerate(prompts)]


def tokens_of(decoded: Decoded) -> list[list[int]]:
    return [[token for tokens, _, _ in each for token in tokens] for each in decoded]


def figures(decoded: Decoded, right: list[list[int]]) -> dict[str, Any]:
    """`equal_share` is of the tokens before the first that differs; `from` says which tiers drew the tokens."""
    found, stats = tokens_of(decoded), [each[-1][2] for each in decoded]
    same = [[*map(int.__eq__, *pair), False].index(False) for pair in zip(found, right, strict=True)]
    origins = b"".join(part for each in decoded for _, part, _ in each)
    return {
        "equal": found == right,
        "equal_share": sum(same) / sum(map(len, right)),
        "ms_per_token": 1e3 * sum(each.decode_s for each in stats) / sum(each.decoded for each in stats),
        "from": {tier.name.lower(): origins.count(tier) for tier in Tier},
    }


def local(settings: Settings, put: Put) -> list[list[int]]:
    """The engine in this process. Returns the tokens of plain decoding."""
    engine, right = load_local_engine(settings), list[list[int]]()
    for plan in TWICE:
        found = defaultdict[int, Any](list)
        for each in run_to_end(engine, requests_of(settings.target.model, plan)):
            found[each.sequence_id].append((each.tokens, each.origins, each.stats))
        decoded = [found[sequence_id] for sequence_id in sorted(found)]
        right = right or tokens_of(decoded)
        put(f"local_{plan}", figures(decoded, right))
    return right


async def decode(pipeline: Any, requests: list[Request], faults: list[Callable[[], None]]) -> Decoded:
    """Decode all requests together; when one of them has some tokens, the fault happens, if there is one."""
    from actors.wire import request_to_proto, stats_from_proto

    async def one(request: Request) -> list[Any]:
        events: list[Any] = []
        async for event in pipeline.decode(request_to_proto(request)):
            events.append((event.token_ids, event.origins, stats_from_proto(event.stats)))
            if faults and sum(len(tokens) for tokens, _, _ in events) >= KILLED_AFTER:
                faults.pop()()
        return events

    return list(await asyncio.gather(*map(one, requests)))


def described(actor: Any) -> dict[str, Any]:
    """Runs in a tier actor: its process, its GPU as Ray and as PyTorch say, its memory there and its slots."""
    import ray
    import torch  # or it would be pickled

    (runner,), held = actor.runners.values(), torch.cuda.memory_reserved() / 2**30
    where = {"pid": os.getpid(), "device": str(runner.model.device), "gpus": ray.get_gpu_ids()}
    return where | {"reserved_gib": held, "slots": runner.kv.allocator.num_slots, "graphs": bool(runner.shaped)}


def served(settings: Settings, right: list[list[int]], put: Put) -> None:
    prepare_environment()
    import ray

    from actors.pipeline import Pipeline
    from actors.placement import reserve
    from actors.warm_up import warm_up

    few: Any = {"num_cpus": 1, "num_gpus": 1, "include_dashboard": False, "object_store_memory": 1 << 29}
    ray.init(address="local", log_to_driver=False, **few)
    try:
        with asyncio.Runner() as runner:
            began = time.monotonic()
            pipeline = runner.run(Pipeline.start(settings, reserve(settings)))
            runner.run(warm_up(pipeline, settings))
            put("start_s", time.monotonic() - began)

            def about(tier: Tier) -> Any:
                return ray.get(pipeline.actors.all()[tier].__ray_call__.remote(described), timeout=60)

            def run(name: str, plan: str, *faults: Callable[[], None]) -> Any:
                requests = requests_of(settings.target.model, plan)
                return put(name, figures(runner.run(decode(pipeline, requests, list(faults))), right))

            put("processes", {tier.name.lower(): about(tier) for tier in Tier})
            for plan in TWICE:
                run(f"served_{plan}", plan)
            pid = about(Tier.RETRIEVAL)["pid"]
            run("killed", "speculative", lambda: os.kill(pid, signal.SIGKILL))
            began = time.monotonic()
            while not run("after", "speculative")["from"]["retrieval"]:  # until it is back, the target drafts nothing
                assert time.monotonic() < began + BACK_WITHIN_S, "the retrieval tier does not come back"
            put("back_s", time.monotonic() - began)
            put("restarted", about(Tier.RETRIEVAL)["pid"] != pid)
            runner.run(pipeline.stop())
    finally:
        ray.shutdown()


def main() -> int:
    parser = ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--geometry", default="llama-1b", help="this, the path of a config.json, or none")
    parser.add_argument("--layers", type=int, help="of the geometry; by default all")
    parser.add_argument("--no-demo", action="store_true", help="the geometry only")
    parser.add_argument("--measured-pool", action="store_true", help="as where no size of KV is set")
    args = parser.parse_args()
    about = {name: value for name, value in vars(args).items() if name != "out"}
    found: dict[str, Any] = {}

    def put(pair: str, name: str, value: Any) -> Any:
        found.setdefault(pair, dict(about))[name] = value
        save(args.out, found)
        return value

    for pair in ["demo"] * (not args.no_demo) + ["random"] * (args.geometry != "none"):
        with nothing_remains(), TemporaryDirectory() as folder:  # even if this process is killed, no actor remains
            try:
                target, draft = random_pair(args, folder) if pair == "random" else ("demo", "demo")
                given: dict[str, Any] = {
                    "device": args.device,
                    "dtype": args.dtype,
                    "threads": 1 if args.device == "cpu" else None,
                }
                pool = {} if args.measured_pool else POOL
                models: dict[str, Any] = {"target": pool | {"model": target}, "draft": {"model": draft}}
                settings = load_settings(**SMALL, **given, **models).cold
                right = local(settings, partial(put, pair))
                gc.collect()
                torch.cuda.empty_cache()
                served(settings, right, partial(put, pair))
            except Exception:  # one pair that fails must not cost the other
                put(pair, "error", traceback.format_exc())
    results = [value for part in found.values() for value in part.values() if isinstance(value, dict)]
    differ = args.dtype == "float32" and any(value.get("equal") is False for value in results)
    return int(differ or any("error" in part for part in found.values()))


if __name__ == "__main__":
    sys.exit(main())
