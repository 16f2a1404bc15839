"""The steps of gpu_check.sh that need Python. Each writes a JSON file, in parts as it goes, so that what was measured
before its time is over is kept.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "triton", "torchao", "pydantic", "pydantic-core", "flash-attn", "numpy", "pytest")


def versions(args: Namespace) -> dict[str, Any]:
    """Versions of the packages, and the GPU's name and driver; the first thing to read where a step fails."""
    found: dict[str, Any] = {"python": sys.version}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    import torch

    found["cuda"] = torch.version.cuda
    found["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.sm,power.limit", "--format=csv"]
    try:
        found["nvidia_smi"] = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        found["nvidia_smi"] = str(error)
    from triforce_core.toolchain import lacking

    found["compiling"] = lacking("cuda") or "has a compiler and headers"
    save(args.out, found)
    assert found["devices"], "PyTorch sees no GPU"
    return found


def bench(args: Namespace) -> dict[str, Any]:
    """`triforce bench device`, without the command line and the packages that it takes. Kernels are fused where a
    compiler works; `kernels` in the result says whether they were.
    """
    from triforce_core.bench.device import DeviceWorkload, bench_device, check
    from triforce_core.bench.synthetic import SyntheticAcceptance
    from triforce_core.messages import SamplingParams

    settings, shapes, context = planned(args)
    load = DeviceWorkload(
        context,
        args.output,
        min(args.prefill, context),
        SyntheticAcceptance.parse(args.acceptance),
        0,
        args.repeats,
        fill=True,
        requests=args.requests,
        samplings=tuple(map(SamplingParams, args.temperatures)),
        verified=args.verified,
    )
    check(settings, shapes, load)
    given = {"geometry": args.geometry}
    found = bench_device(settings, shapes, load, say, lambda found: save(args.out, given | found))
    return given | found


def plain(args: Namespace) -> dict[str, Any]:
    """Milliseconds a token of our plain decoding, by context: a short one, a longer one, and the longest that fits."""
    from triforce_core.bench.device import DeviceWorkload, synthetic_engine
    from triforce_core.bench.synthetic import SyntheticAcceptance
    from triforce_core.bench.together import Together
    from triforce_core.engine.sequence import Request
    from triforce_core.messages import GREEDY

    settings, shapes, longest = planned(args)
    rates = SyntheticAcceptance(1.0, 1.0)  # of nothing: plain decoding proposes no tokens
    load = DeviceWorkload(longest, args.output, 1, rates, 0, 1, fill=True)
    engine, found = synthetic_engine(settings, shapes, load), dict[str, Any]()
    for context in contexts(longest):
        request = Request(tuple(i % 256 for i in range(context)), load.room, GREEDY, 0, (0, 0))
        found[str(context)] = min(Together(engine, [request], args.output).ms_per_token for _ in range(3))
        say(f"{context} tokens: {found[str(context)]:.2f} ms a token")
        save(args.out, found)
    return found


def generate(args: Namespace) -> dict[str, Any]:
    """The same of transformers' `generate`, with the same weights, at the same contexts, in a process of its own."""
    import torch

    from triforce_core.bench.generate import generate_ms
    from triforce_core.bench.geometry import random_model

    settings, shapes, longest = planned(args)
    model, found = random_model(shapes.target, settings), dict[str, Any]()
    model.set_attn_implementation("sdpa")
    for context in contexts(longest):
        try:
            found[str(context)] = generate_ms(model, context, args.output)
        except Exception as error:  # its masks and graphs may need more memory than is there
            found[str(context)] = f"{type(error).__name__}: {error}"[:300]
        say(f"{context} tokens: {found[str(context)]} ms a token")
        save(args.out, found)
        torch.compiler.reset()  # what is compiled for one context does not make the next one slower
    return found


def contexts(longest: int) -> list[int]:
    return [*(each for each in (4096, 16_384) if each < longest), longest]


def planned(args: Namespace) -> tuple[Any, Any, int]:
    """Settings, geometry, and tokens of context: as many as fit, at most those that were asked for."""
    from triforce_core.bench.device import room_for
    from triforce_core.bench.fitting import fitting_context
    from triforce_core.bench.geometry import geometry_of

    settings, shapes = settings_of(args), geometry_of(args.geometry)
    fitting = fitting_context(settings, shapes, room_for(args.output), args.prefill, args.requests)
    return settings, shapes, min(args.context or fitting, fitting)


def say(line: str) -> None:
    print(line, flush=True)


def attention(args: Namespace) -> dict[str, Any]:
    """Microseconds of a layer's attention in captured passes, by each way of reading a range of keys."""
    import torch

    from triforce_core.bench.attention import CASES, bench_attention

    device, found = torch.device(args.device), dict[str, Any]()
    for case in CASES:
        try:
            found[str(case)] = bench_attention(device, torch.bfloat16, (case,), say)
        except Exception as error:  # one case that fails must not cost the others
            found[str(case)] = f"{type(error).__name__}: {error}"[:300]
        save(args.out, found)
    return found


def profile(args: Namespace) -> dict[str, Any]:
    """Kernels of one pass of each tier by the time that they take, and a Chrome trace of them beside."""
    import torch
    from torch.profiler import ProfilerActivity

    from triforce_core.bench.device import DeviceWorkload, synthetic_engine
    from triforce_core.bench.geometry import geometry_of
    from triforce_core.bench.stages import decoding, drafting, level_below, verifying
    from triforce_core.bench.synthetic import SyntheticAcceptance
    from triforce_core.decoder import SpeculativeDecoder
    from triforce_core.messages import GREEDY, SamplingParams

    settings, shapes = settings_of(args), geometry_of(args.geometry)
    load = DeviceWorkload(args.context or 16_384, 256, 1024, SyntheticAcceptance(0.92, 0.6), 0, 1, True)
    engine = synthetic_engine(settings, shapes, load)
    found: dict[str, Any] = {}
    for name, sampling in (("greedy", GREEDY), ("sampled", SamplingParams(temperature=1.0, top_p=0.95))):
        prompt = tuple(i % 1000 for i in range(load.context))
        sequences = decoding(engine, [prompt], settings.speculation.effective, sampling)
        retrieval = level_below(engine.decoder)
        assert isinstance(engine.decoder, SpeculativeDecoder)
        assert isinstance(retrieval, SpeculativeDecoder)
        passes: dict[str, Callable[[], object]] = {
            "retrieval": verifying(retrieval.verifier, sequences, 4),
            "draft": drafting(retrieval.proposer, sequences),
            "verify": verifying(engine.decoder.verifier, sequences, 9),
            "round": engine.run_once,
        }
        for tier, run in passes.items():
            run()
            with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
                run()
                torch.cuda.synchronize()
            rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)[:25]
            found[f"{tier}, {name}"] = [[row.key[:120], row.count, row.self_device_time_total] for row in rows]
            seen.export_chrome_trace(str(args.out.with_name(f"trace_{tier}_{name}.json")))
            save(args.out, found)
        for sequence in sequences:
            engine.cancel(sequence.sequence_id)
        engine.run_once()
    return found


def link(args: Namespace) -> dict[str, Any]:
    """Rates in GB/s: of copies between host and device, pinned and pageable, and of a CRC-32 on the host."""
    import zlib

    import torch

    from triforce_core.bench.peaks import seconds

    device, size = torch.device(args.device), 1 << 28
    pageable, there = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8, device=device)
    found: dict[str, Any] = {}
    for name, host in (("pageable", pageable), ("pinned", pageable.pin_memory())):
        found[f"{name} to device"] = (
            size / seconds(lambda host=host: there.copy_(host, non_blocking=True), device) / 1e9
        )
        found[f"device to {name}"] = (
            size / seconds(lambda host=host: host.copy_(there, non_blocking=True), device) / 1e9
        )
        save(args.out, found)
    began = time.perf_counter()
    zlib.crc32(pageable.numpy().data)
    found["crc32"] = size / (time.perf_counter() - began) / 1e9
    return found


def settings_of(args: Namespace) -> Any:
    from triforce_core.config import Settings

    retrieval = {"budget": args.budget, "quantization": args.quantization}
    given = {"device": args.device, "dtype": args.dtype, "retrieval": retrieval, "target": {"offload": args.offload}}
    return Settings.model_validate({**given, "max_sequences": 1, "speculation": {"lookaheads": args.lookaheads}})


def save(path: Path, found: dict[str, Any]) -> None:
    """Written beside and renamed, for a step may be killed at any moment and what it has measured must remain."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found, indent=1) + "\n")
    part.replace(path)


STEPS: dict[str, Callable[[Namespace], dict[str, Any]]] = {
    step.__name__: step for step in (versions, bench, plain, generate, attention, profile, link)
}


def listed(kind: type[Any]) -> Callable[[str], tuple[Any, ...]]:
    return lambda text: tuple(map(kind, text.split(",")))


def parsed(arguments: list[str] | None = None) -> Namespace:
    parser = ArgumentParser()
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--geometry", default="llama2-7b-128k")
    parser.add_argument("--context", type=int, help="of each prompt, at most; by default as many tokens as fit")
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--prefill", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--requests", type=int, default=1, help="decoded together")
    parser.add_argument("--budget", type=int, default=4096)
    parser.add_argument("--acceptance", default=".92,.6")
    parser.add_argument("--lookaheads", type=listed(int), default=(8, 3))
    parser.add_argument("--temperatures", type=listed(float), default=(0.0, 0.6))
    parser.add_argument("--verified", type=listed(int), default=(1, 3, 7, 9, 17), help="tokens of the target's passes")
    parser.add_argument("--offload", default="none")
    parser.add_argument("--quantization", help="of the self-drafter's weights")
    return parser.parse_args(arguments)


def main() -> None:
    args = parsed()
    save(args.out, STEPS[args.step](args))


if __name__ == "__main__":
    main()
