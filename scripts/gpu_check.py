"""The worker of gpu_check.sh: one process that runs jobs before a deadline, the most telling first.

Each job has a JSON file, which is written in parts as it goes. A job whose file says that it is done or failed is not
run again, so a run that was killed can be resumed. A job that was begun twice and never ended is not begun again.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import json
import signal
import subprocess
import sys
import tarfile
import time
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity

from triforce_core.attention.flash_decoding import attention
from triforce_core.building.inspection import kernels_of, runners_of
from triforce_core.config import Settings
from triforce_core.engine.engine import Engine
from triforce_core.engine.sequence import Request
from triforce_core.machine.device import DTYPES
from triforce_core.machine.memory import free_bytes
from triforce_core.machine.toolchain import lacking
from triforce_core.messages import GREEDY, SamplingParams, Tier
from triforce_core.speculation.decoder import SpeculativeDecoder
from triforce_tools.bench.device import DeviceWorkload, bench_device, check, synthetic_engine
from triforce_tools.bench.fitting import LONGEST, fitting_context
from triforce_tools.bench.generate import generate_ms
from triforce_tools.bench.geometry import Geometry, geometry_of, random_model
from triforce_tools.bench.peaks import measure_peaks, seconds, synchronize
from triforce_tools.bench.stages import decoding, drafting, level_below, verifying
from triforce_tools.bench.synthetic import SyntheticAcceptance
from triforce_tools.bench.together import Together, finish

PACKAGES = ("torch", "transformers", "triton", "ray", "pydantic", "pydantic-core", "numpy", "pytest")
SPARED_S = 5  # of the deadline, for packing
LEAST_S = 10  # with less time left no job begins
Found = dict[str, Any]
Keep = Callable[[Found], None]


@dataclass(frozen=True, slots=True)
class Case:
    """What one job measures. Prompts are as long as the load says, where that fits."""

    geometry: str
    load: DeviceWorkload
    budget: int = 4096
    offload: str = "none"
    quantization: str | None = None
    lookaheads: tuple[int, int] = (8, 3)
    exact: str = "off"


LOAD = DeviceWorkload(LONGEST, 128, (8192, 65_536), SyntheticAcceptance(0.92, 0.6), seed=0, repeats=2, fill=True)
BRIEF = replace(LOAD, output=64, repeats=1, samplings=(GREEDY,), prefills=(4096,))
FULL = Case("llama2-7b-128k", LOAD)


class CutOff(BaseException):
    """A job's time is over. No `Exception`: what falls back where a kernel cannot be compiled must not take it."""


class Worker:
    """The engine of the present case, which the jobs that follow use too if their case has the same."""

    def __init__(self, args: Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        self.case: Case | None = None
        self.ready: tuple[Engine, Settings, Geometry, DeviceWorkload] | None = None

    def engine(self, case: Case) -> tuple[Engine, Settings, Geometry, DeviceWorkload]:
        if self.ready is None or self.case != case:
            self.release()
            settings, shapes = self.settings(case), self.shapes(case.geometry)
            load = replace(case.load, output=min(case.load.output, self.args.output or case.load.output))
            fitting = fitting_context(settings, shapes, load.room, load.requests)
            load = load.of(min(load.context, fitting, self.args.context or fitting))
            check(settings, shapes, load)
            self.case, self.ready = case, (synthetic_engine(settings, shapes, load), settings, shapes, load)
        return self.ready

    def release(self) -> None:
        """Give the engine's memory back."""
        self.case = self.ready = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def settings(self, case: Case) -> Settings:
        budget = min(case.budget, self.args.budget or case.budget)
        given: Found = {
            "device": self.args.device,
            "dtype": self.args.dtype,
            "max_sequences": 1,
            "exact": case.exact,
            "retrieval": {"budget": budget, "quantization": case.quantization},
            "target": {"offload": case.offload},
            "speculation": {"lookaheads": case.lookaheads},
        }
        if self.device.type == "cpu":
            given["threads"] = 1  # a rehearsal: tiny passes on several threads wait for each other
        return Settings.model_validate(given)

    def shapes(self, name: str, layers: int | None = None) -> Geometry:
        shapes = geometry_of(self.args.geometry or name)
        shapes.target.num_hidden_layers = layers or self.args.layers or shapes.target.num_hidden_layers
        return shapes

    def bench(self, case: Case, keep: Keep) -> None:
        engine, settings, shapes, load = self.engine(case)
        given = {"geometry": case.geometry, "layers": shapes.target.num_hidden_layers}
        found = bench_device(settings, shapes, load, say, lambda found: keep(given | found), engine)
        keep(given | found)


def versions(worker: Worker, keep: Keep) -> None:
    """Versions of the packages, the GPU's name and driver, the host's memory: the first to read where a job fails."""
    found: Found = {"python": sys.version, "cuda": torch.version.cuda}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.sm,power.limit", "--format=csv"]
    try:
        found["nvidia_smi"] = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        found["nvidia_smi"] = str(error)
    found["compiling"] = lacking(worker.device.type) or "has a compiler and headers"
    found["host_memory"] = Path("/proc/meminfo").read_text().splitlines()[:3]
    keep(found)
    assert worker.device.type != "cuda" or torch.cuda.is_available(), "PyTorch sees no GPU"


def tests(worker: Worker, keep: Keep) -> None:
    """tests/gpu in a process of its own, while the kernels of the jobs that follow are compiled here."""
    out: Path = worker.args.out
    command = [sys.executable, "-m", "pytest", *worker.args.tests.split(), "-v", "-rf", "--tb=short", "--timeout=60"]
    command += ["-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib", f"--junitxml={out / 'tests.xml'}"]
    with (out / "tests.log").open("w") as log:
        tested = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    found: Found = {}
    try:
        began = time.monotonic()
        # Two layers have the kernels of all.
        shapes, load = worker.shapes(FULL.geometry, 2), BRIEF.of(min(4096, worker.args.context or 4096))
        engine = synthetic_engine(worker.settings(FULL), shapes, load)
        for sampling in LOAD.samplings:
            Together(engine, [Request((1,) * load.context, load.room, sampling, 0, FULL.lookaheads)], load.output)
        found = {
            "compile_s": time.monotonic() - began,
            "kernels": {tier.name.lower(): kernels_of(each) for tier, each in runners_of(engine).items()},
        }
        keep(found)
        del engine
        worker.release()
        found["tests_status"] = tested.wait()
        found["tests_s"] = time.monotonic() - began
    finally:
        tested.send_signal(signal.SIGINT)  # then pytest says what has failed by now
        with contextlib.suppress(subprocess.TimeoutExpired):
            tested.wait(5)
        tested.kill()
        tested.wait()
        found["last_lines"] = (out / "tests.log").read_text(errors="replace").splitlines()[-25:]
        keep(found)
    assert found["tests_status"] == 0, "tests failed; see tests.log"


def full(worker: Worker, keep: Keep) -> None:
    """All stages and decoding with one request, as long as fits."""
    worker.bench(FULL, keep)


def profile(worker: Worker, keep: Keep) -> None:
    """Kernels of one pass of each tier, and of a round, by the time that they take; a Chrome trace of the rounds."""
    engine, settings, _, load = worker.engine(FULL)
    on = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if worker.device.type == "cuda" else [])]
    found: Found = {}
    for name, sampling in (("greedy", GREEDY), ("sampled", SamplingParams(temperature=1.0, top_p=0.95))):
        prompt = tuple(i % 200 for i in range(min(16_384, load.context)))
        sequences = decoding(engine, [prompt], settings.speculation.effective, sampling)
        retrieval = level_below(engine.decoder)
        assert isinstance(engine.decoder, SpeculativeDecoder)
        assert isinstance(retrieval, SpeculativeDecoder)
        passes: dict[str, Callable[[], object]] = {
            "retrieval": verifying(retrieval.verifier, sequences, 4),
            "draft": drafting(retrieval.proposer, sequences, settings.speculation.effective[1]),
            "verify": verifying(engine.decoder.verifier, sequences, 9),
            "round": engine.run_once,
        }
        for tier, run in passes.items():
            run()
            with torch.profiler.profile(activities=on) as seen:
                run()
                synchronize(worker.device)
            rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)[:25]
            found[f"{tier}, {name}"] = [[row.key[:120], row.count, row.self_device_time_total] for row in rows]
            if tier == "round":
                seen.export_chrome_trace(str(worker.args.out / f"trace_{name}.json"))
            keep(found)
        finish(engine, {sequence.request_id for sequence in sequences})


def plain(worker: Worker, keep: Keep) -> None:
    """Milliseconds a token of our plain decoding, by context, to compare with `generate`."""
    engine, _, _, load = worker.engine(FULL)
    found: Found = {}
    for context in (4096, 16_384, load.context):
        if context <= load.context:
            request = Request((1,) * context, load.room, GREEDY, 0, (0, 0))
            found[str(context)] = min(Together(engine, [request], 64).ms_per_token for _ in range(2))
            keep(found)


def batch(worker: Worker, keep: Keep) -> None:
    """Six requests; a budget of 4096 for each would leave no room on 80 GB."""
    worker.bench(replace(FULL, budget=768, load=replace(BRIEF, requests=6, context=19_456)), keep)


def offload(worker: Worker, keep: Keep) -> None:
    """KV in the host's memory. The published figure is for two 4090s, 127K tokens and a slower link."""
    load = replace(BRIEF, context=33_280, output=32, verified=(1, 17), acceptance=SyntheticAcceptance(0.94, 0.6))
    worker.bench(replace(FULL, offload="host", lookaheads=(16, 3), load=load), keep)


def products(worker: Worker, keep: Keep) -> None:
    """What is left alone where a pass is taken apart: its matrix products by number of tokens, as shares of the copy,
    and the attention of a prefill, as shares of the matrix peak.
    """
    worker.release()
    config, device, dtype = worker.shapes(FULL.geometry).target, worker.device, DTYPES[worker.args.dtype]
    peaks, hidden, inner = measure_peaks(device, dtype), config.hidden_size, config.intermediate_size
    heads, head_dim, found = config.num_attention_heads, config.hidden_size // config.num_attention_heads, Found()
    for name, (inside, outside) in {
        "query, key and value": (hidden, 3 * hidden),
        "attention's output": (hidden, hidden),
        "gate and up": (hidden, 2 * inner),
        "down": (inner, hidden),
    }.items():
        weights = torch.randn(outside, inside, device=device).to(dtype)
        for tokens in (1, 4, 9, 12):
            some = torch.randn(tokens, inside, device=device).to(dtype)
            taken = seconds(partial(torch.nn.functional.linear, some, weights), device)
            found[f"{name}, {tokens}"] = {"us": 1e6 * taken, "share": weights.nbytes / taken / 1e9 / peaks.copy_gb_s}
        keep(found)
    own = min(8192, worker.args.context or 8192)
    query = torch.randn(1, heads, own, head_dim, device=device).to(dtype)
    for past in (0, own):
        keys = torch.randn(1, heads, past or own, head_dim, device=device).to(dtype)
        attend = partial(scaled_dot_product_attention, query, keys, keys, is_causal=not past)
        taken = seconds(attend, device, repeats=3)
        flops = 4 * heads * head_dim * own * (past or own / 2)
        found[f"attention of {own} tokens to {past or 'each other'}"] = {
            "ms": 1e3 * taken,
            "share": flops / taken / 1e12 / peaks.matrix_tflops,
        }
        keep(found)


def bits(worker: Worker, keep: Keep) -> None:
    """For each product of a layer, for the norm, and for attention to 16 items of 2,048 keys: numbers of rows in
    groups, such that the first row has the same bits with each number of a group.
    """
    worker.release()
    config, device, found = worker.shapes(FULL.geometry).target, worker.device, Found()
    hidden, inner, most = config.hidden_size, config.intermediate_size, 2048
    head_dim = hidden // config.num_attention_heads
    for name in ("bfloat16", "float16", "float32"):
        dtype = DTYPES[name]
        for inside, outside in ((hidden, 3 * hidden), (hidden, hidden), (hidden, 2 * inner), (inner, hidden)):
            weights = torch.randn(outside, inside, device=device).to(dtype)
            rows = torch.randn(most, inside, device=device).to(dtype)
            multiply = partial(torch.nn.functional.linear, weight=weights)
            found[f"{name}, {inside} to {outside}"] = alike(multiply, rows)
        rows = torch.randn(most, hidden, device=device).to(dtype)
        norm = partial(torch.nn.functional.rms_norm, normalized_shape=(hidden,))
        found[f"{name}, norm"] = alike(norm, rows)
        keep(found)
        if device.type == "cpu" or name == "float32":
            continue
        keys, values = torch.randn(2, 8, most * 16, head_dim, device=device).to(dtype)
        starts = torch.arange(0, most * 17, most, device=device, dtype=torch.int32)
        lengths = torch.full((16,), most, device=device, dtype=torch.int32)
        for group in (1, 4):
            rows = torch.randn(32, group, 8, head_dim, device=device).to(dtype)

            def attend(asked: Tensor) -> Tensor:
                each = asked.flatten(0, 1).expand(16, -1, -1, -1)
                output: Tensor = attention(each, keys, values, head_dim**-0.5, starts, lengths)[0]  # noqa: B023
                return output[None, :, 0]

            found[f"{name}, attention of {group} heads to one"] = alike(attend, rows)
        keep(found)


def alike(run: Callable[[Tensor], Tensor], rows: Tensor) -> list[list[int]]:
    """Numbers of rows, in groups of those with which the first row of the result is the same."""
    groups: list[tuple[Tensor, list[int]]] = []
    for number in (*range(1, 34), 48, 64, 96, 128, 256, 512, 1024, 2048):
        if number <= len(rows):
            first = run(rows[:number])[0].clone()
            group = next((numbers for known, numbers in groups if torch.equal(known, first)), None)
            if group is None:
                groups.append((first, [number]))
            else:
                group.append(number)
    return [numbers for _, numbers in groups]


def served(worker: Worker, keep: Keep) -> None:
    """Three Ray actors on this device, in processes of their own; see gpu_served.py."""
    worker.release()
    free = free_bytes(worker.device)
    path = worker.args.out / "served_parts.json"
    command = [sys.executable, "-m", "scripts.gpu_served", str(path), f"--device={worker.args.device}"]
    command += worker.args.served.split()
    with (worker.args.out / "served.log").open("w") as log:
        running = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        status = running.wait()
    finally:
        running.kill()
        running.wait()
        until = time.monotonic() + 15  # its actors end some seconds after it, and the next job needs their memory
        while worker.device.type == "cuda" and free_bytes(worker.device) < 0.99 * free and time.monotonic() < until:
            time.sleep(0.2)
        if path.is_file():
            keep(json.loads(path.read_text()))
    assert status == 0, "it failed; see served.log"


def int8(worker: Worker, keep: Keep) -> None:
    """A self-drafter of 8-bit weights, beside which less context fits."""
    worker.bench(replace(FULL, quantization="int8", load=BRIEF), keep)


def exact(worker: Worker, keep: Keep) -> None:
    """What `exact: on` costs: passes, prefills and decoding of two shapes, with it and without."""
    found: Found = {}
    for shape, context in (("llama-3.1-8b", 32_768), (FULL.geometry, 8192)):
        for chosen in ("off", "on"):
            case, began = Case(shape, replace(BRIEF, context=context), exact=chosen), time.monotonic()
            engine, *_ = worker.engine(case)
            told = found[f"{shape}, {chosen}"] = Found(
                inexact=engine.inexact,
                padding=runners_of(engine)[Tier.TARGET].padding,
                start_s=time.monotonic() - began,
            )
            keep(found)
            worker.bench(case, told.update)
            keep(found)


def gqa(worker: Worker, keep: Keep) -> None:
    """A model whose query heads share KV heads."""
    worker.bench(Case("llama-3.1-8b", BRIEF), keep)


def generate(worker: Worker, keep: Keep) -> None:
    """transformers' `generate` with the same weights, to compare with `plain`; it compiles for over a minute."""
    worker.release()
    model = random_model(worker.shapes(FULL.geometry).target, worker.settings(FULL))
    model.set_attn_implementation("sdpa")
    context = min(4096, worker.args.context or 4096)
    keep({str(context): generate_ms(model, context, 64)})


# The most seconds of each, and what the two commands run.
JOBS: dict[str, tuple[Callable[[Worker, Keep], None], int]] = {
    "versions": (versions, 20),
    "tests": (tests, 120),
    "full": (full, 120),
    "profile": (profile, 25),
    "plain": (plain, 25),
    "batch": (batch, 60),
    "offload": (offload, 90),
    "products": (products, 40),
    "bits": (bits, 40),
    "served": (served, 150),
    "exact": (exact, 100),
    "int8": (int8, 60),
    "gqa": (gqa, 70),
    "generate": (generate, 100),
}
# Those of test_fused.py, which compile for minutes, last.
TESTS = " ".join(sorted(map(str, Path("tests/gpu").glob("test_*.py")), key=lambda path: ("fused" in path, path)))
FIRST = "versions tests full profile plain batch offload products"
SECOND = "versions bits served exact int8 gqa generate"


def say(line: str) -> None:
    print(line, flush=True)


def save(path: Path, found: Found) -> None:
    """Written beside and renamed, for a job may be killed at any moment and what it has measured must remain."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found, indent=1) + "\n")
    part.replace(path)


def pack(folder: Path, into: Path) -> None:
    """Traces are left out: they are the one thing that may be too large to bring back."""
    part = into.with_suffix(".part")
    with tarfile.open(part, "w:gz") as packed:
        packed.add(folder, ".", filter=lambda each: None if "/trace_" in each.name else each)
    part.replace(into)


@contextlib.contextmanager
def at_most(limit_s: float) -> Iterator[None]:
    """Raise `CutOff` in the body after that many seconds."""

    def ring(*_: object) -> None:
        raise CutOff(f"after {limit_s:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_job(worker: Worker, name: str, left_s: float) -> bool:
    """Run a job unless it is over; whether this process can go on. After an error another process must, since a GPU
    may have been left in any state.
    """
    path = worker.args.out / f"{name}.json"
    told: Found = json.loads(path.read_text()) if path.is_file() else {"begun": 0}
    if told.get("state") in ("done", "failed", "cut off"):
        return True
    if told["begun"] == 2:
        save(path, told | {"state": "failed", "why": "this process or its job was killed twice"})
        return True
    run, most = JOBS[name]
    began, told = time.monotonic(), told | {"state": "begun", "begun": told["begun"] + 1}
    save(path, told)

    def keep(found: Found) -> None:
        save(path, told | {"seconds": time.monotonic() - began} | {"found": found})
        told["found"] = found

    try:
        with at_most(min(most, left_s)):
            run(worker, keep)
        told["state"] = "done"
    except CutOff as error:  # resumed if it was the time of all that was over
        told |= {"state": "cut off" if most <= left_s else "begun", "why": str(error)}
        worker.release()
    except Exception:
        told |= {"state": "failed", "why": traceback.format_exc().splitlines()[-12:]}
    told["seconds"] = time.monotonic() - began
    save(path, told)
    say(f"{name}: {told['state']} after {told['seconds']:.1f} s {told.get('why', '')}")
    return bool(told["state"] != "failed")


def main() -> int:
    args = parsed()
    args.out.mkdir(parents=True, exist_ok=True)
    worker = Worker(args)
    for name in args.jobs:
        left_s = args.until - time.time() - SPARED_S
        if left_s < LEAST_S:
            say(f"{name}: not begun, time is over")
            continue
        go_on = run_job(worker, name, left_s)
        pack(args.out, args.out.with_name(f"{args.out.name}.tgz"))
        if not go_on:
            return 3
    return 0


def parsed() -> Namespace:
    parser = ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--jobs", type=jobs_of, default=FIRST.split(), help=f"of {' '.join(JOBS)}; or first, second")
    parser.add_argument("--until", type=float, default=time.time() + 400, help="the deadline, in seconds since 1970")
    parser.add_argument("--tests", default=TESTS, help="what pytest gets")
    parser.add_argument("--served", default="", help="what gpu_served.py gets")
    # For a rehearsal where there is no such GPU:
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--geometry", help="of all jobs")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--context", type=int, help="at most")
    parser.add_argument("--budget", type=int, help="at most")
    parser.add_argument("--output", type=int, help="at most")
    return parser.parse_args()


def jobs_of(text: str) -> list[str]:
    names = {"first": FIRST, "second": SECOND}.get(text, text).split()
    if unknown := set(names) - set(JOBS):
        raise ValueError(unknown)
    return names


if __name__ == "__main__":
    sys.exit(main())
