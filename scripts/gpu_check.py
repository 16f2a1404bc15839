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
from functools import partial
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
    from triforce_core.models.toolchain import lacking

    found["compiling"] = lacking("cuda") or "has a compiler and headers"
    save(args.out, found)
    assert found["devices"], "PyTorch sees no GPU"
    return found


def bench(args: Namespace) -> dict[str, Any]:
    """`triforce bench device`, without the command line and the packages that it takes. Kernels are fused where a
    compiler works; `kernels` in the result says whether they were.
    """
    from triforce_core.bench.device import STAGE_TOKENS, DeviceWorkload, bench_device, check
    from triforce_core.bench.fitting import fitting_context
    from triforce_core.bench.geometry import geometry_of
    from triforce_core.bench.synthetic import SyntheticAcceptance

    settings, shapes = settings_of(args), geometry_of(args.geometry)
    room = max(args.output, STAGE_TOKENS)
    context = args.context or fitting_context(settings, shapes, room, args.prefill)
    rates = SyntheticAcceptance(0.92, 0.6)
    load = DeviceWorkload(context, args.output, min(args.prefill, context), rates, 0, args.repeats, True)
    check(settings, shapes, load)
    return bench_device(settings, shapes, load, lambda line: print(line, flush=True))


def attention(args: Namespace) -> dict[str, Any]:
    """Microseconds of a layer's attention in captured passes, by each way of reading a range of keys."""
    import torch

    from triforce_core.bench.attention import CASES, bench_attention

    device, found = torch.device(args.device), dict[str, Any]()
    for case in CASES:
        try:
            found[str(case)] = bench_attention(device, torch.bfloat16, (case,), partial(print, flush=True))
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

    given = {"device": args.device, "dtype": "bfloat16", "max_sequences": 1, "retrieval": {"budget": 4096}}
    return Settings.model_validate(given)


def save(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps(found, indent=1) + "\n")


STEPS: dict[str, Callable[[Namespace], dict[str, Any]]] = {
    step.__name__: step for step in (versions, bench, attention, profile, link)
}


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--geometry", default="llama2-7b-128k")
    parser.add_argument("--context", type=int)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--prefill", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    save(args.out, STEPS[args.step](args))


if __name__ == "__main__":
    main()
