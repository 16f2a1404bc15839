"""`triforce bench parameters`: what each sampling parameter costs, in milliseconds a token with it on and off.

The values are chosen so that they change no token: both runs then do the same work otherwise.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from triforce_core.config import Settings
from triforce_core.engine.engine import Engine
from triforce_core.engine.loading import load_local_engine
from triforce_core.engine.local_threads import choose_threads
from triforce_core.engine.sequence import Request
from triforce_core.messages import SamplingParams
from triforce_core.models.cpu import cpu_summary
from triforce_core.models.load import load_tokenizer, stop_token_ids
from triforce_core.sampling.grammars import Grammars
from triforce_core.sampling.guides import Guide
from triforce_tools.bench.decode import Measurement
from triforce_tools.bench.prompts import held_out_tokens

LARGE_VOCABULARY = 131_072
NOTHING = 1e-30  # a number that is not 0 and changes no logit
SCHEMA = (
    '{"type": "object", "properties": {"name": {"type": "string"}, "size": {"type": "integer"}, "tags": {"type":'
    ' "array", "items": {"type": "string"}}, "parent": {"anyOf": [{"type": "null"}, {"type": "object", "properties":'
    ' {"name": {"type": "string"}}, "required": ["name"]}]}}, "required": ["name", "size", "tags", "parent"]}'
)
ANY_TEXT = Guide("regex", r"(?s:.)*")


def features(request: Request, settings: Settings) -> dict[str, Request]:
    """For each parameter, by its name: the request with this parameter added."""
    never = random.Random(0)
    words = tuple((never.randrange(1000), never.randrange(1000), never.randrange(1000)) for _ in range(64))
    sampling: dict[str, dict[str, Any]] = {
        "repetition_penalty": {"repetition_penalty": 1 + 1e-12},
        "presence and frequency penalty": {"presence_penalty": NOTHING, "frequency_penalty": NOTHING},
        "logit_bias, 300 tokens": {"logit_bias": tuple((token, 0.0) for token in range(300))},
        "bad_words, 64 of 3 tokens": {"bad_word_ids": words},
        "min_tokens": {"min_tokens": request.max_tokens},
    }
    changed = {name: replace(request, sampling=replace(request.sampling, **more)) for name, more in sampling.items()}
    changed["min_tokens"] = replace(changed["min_tokens"], stop_token_ids=stop_token_ids(settings.target.model))
    return {
        **changed,
        "logprobs: 5": replace(request, logprobs=5),
        "grammar of any text": replace(request, grammar=ANY_TEXT.grammar()),
    }


def bench_parameters(
    settings: Settings, *, context: int, output: int, repeats: int, report: Callable[[str], None]
) -> dict[str, Any]:
    """Run the benchmark and return its figures."""
    load_before = os.getloadavg()[0]
    engine = load_local_engine(settings.cold)
    prompt = tuple(held_out_tokens(load_tokenizer(settings.target.model), context, 0))
    choose_threads(engine, settings, report)
    base = Request(prompt, output, SamplingParams(0.0), 0, settings.speculation.effective)
    Measurement(engine, base)
    costs: dict[str, dict[str, Any]] = {}
    for name, request in features(base, settings).items():
        modes = {"plain": (0, 0), "triforce": settings.speculation.effective}
        costs[name] = {
            mode: compared(engine, replace(base, lookaheads=n), replace(request, lookaheads=n), repeats)
            for mode, n in modes.items()
        }
        shown = {mode: f"{cost['off_ms']:.2f} -> {cost['on_ms']:.2f} ms" for mode, cost in costs[name].items()}
        report(f"{name}: {shown}")
    return {
        "context": context,
        "output": output,
        "dtype": settings.dtype,
        "cpu": cpu_summary(),
        "ms_per_token": costs,
        "prompt_logprobs_prefill_s": prefill_seconds(engine, base, repeats),
        "masks": {
            str(vocab_size): mask_times(tokenizer, vocab_size)
            for vocab_size, tokenizer in vocabularies(settings, engine.limits.vocab_size).items()
        },
        "load_average": [load_before, os.getloadavg()[0]],
    }


def compared(engine: Engine, off: Request, on: Request, repeats: int) -> dict[str, Any]:
    """Milliseconds a token without and with a parameter, as medians of pairs in alternating order."""
    pairs = []
    for repeat in range(repeats):
        order = [off, on] if repeat % 2 == 0 else [on, off]
        runs = {id(request): Measurement(engine, request) for request in order}
        pairs.append((runs[id(off)], runs[id(on)]))
    return {
        "off_ms": statistics.median(before.ms_per_token for before, _ in pairs),
        "on_ms": statistics.median(after.ms_per_token for _, after in pairs),
        "ratio": statistics.median(after.ms_per_token / before.ms_per_token for before, after in pairs),
        "same_tokens": all(before.tokens == after.tokens for before, after in pairs),
    }


def prefill_seconds(engine: Engine, base: Request, repeats: int) -> dict[str, float]:
    """Prefill seconds of a prompt, without and with the logprobs of its tokens."""
    off, on = [], []
    for _ in range(repeats):
        off.append(Measurement(engine, replace(base, max_tokens=2)).stats.prefill_s)
        on.append(Measurement(engine, replace(base, max_tokens=2, prompt_logprobs=5)).stats.prefill_s)
    return {"off": statistics.median(off), "on": statistics.median(on)}


# -- masks -------------------------------------------------------------------------------------------------------------


def vocabularies(settings: Settings, vocab_size: int) -> dict[int, Any]:
    """The model's own tokenizer, and a synthetic one whose vocabulary is as large as those of large models."""
    return {vocab_size: load_tokenizer(settings.target.model), LARGE_VOCABULARY: large_tokenizer()}


def large_tokenizer() -> PreTrainedTokenizerFast:
    """All bytes, and random words of 2 to 12 letters, half of them after a blank."""
    letters, rng = "etaoinshrdlcumwfgypbvkjxqz_ETAOIN0123456789", random.Random(0)
    names = {**dict.fromkeys(byte_names()), "<end>": None}
    while len(names) < LARGE_VOCABULARY:
        names[rng.choice(["", "\u0120"]) + "".join(rng.choices(letters, k=rng.randint(2, 12)))] = None
    words = Tokenizer(BPE(vocab={name: token for token, name in enumerate(names)}, merges=[]))
    words.decoder = ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")


def byte_names() -> list[str]:
    """GPT-2's printable names of the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]


def mask_times(tokenizer: Any, vocab_size: int, outputs: int = 20, length: int = 60) -> dict[str, float]:
    """Milliseconds to compile a JSON schema, and for the mask of one position of outputs that follow it."""
    grammars, grammar, rng = (
        Grammars(lambda: tokenizer, vocab_size),
        Guide("json_schema", SCHEMA).grammar(),
        random.Random(0),
    )
    started = time.perf_counter()
    grammars.compile(grammar).result()
    compiled = time.perf_counter()
    times = []
    for _ in range(outputs):
        state, output = grammars.state(grammar, wait=True), list[int]()
        assert state is not None
        while len(output) < length:
            before = time.perf_counter()
            allowed = state.masks(output, [], len(output), ())[0]
            times.append(1e3 * (time.perf_counter() - before))
            ids = allowed.nonzero().flatten().tolist()
            if not ids:
                break
            output.append(rng.choice(ids))
    return {
        "tokenizer_and_compile_ms": 1e3 * (compiled - started),
        "median_ms": statistics.median(times),
        "p99_ms": statistics.quantiles(times, n=100)[98],
    }
