"""Whether a target computes the same bits for a token whatever else is in the pass: it is tried at start.

Attention in blocks (attention/blocks.py) does so on CPUs. Products need not: libraries choose their kernels by the
number of rows, and by the machine. docs/decisions/0032-bits.md
"""

import json
import logging
import random
from hashlib import blake2b
from itertools import pairwise

import torch
import transformers
from torch import Tensor

from triforce_core.config import Settings
from triforce_core.errors import InvalidValueError
from triforce_core.kv.base import Forward
from triforce_core.kv.full import FullKV
from triforce_core.machine.cpu import TELLING, cpu_flags, cpu_vendor
from triforce_core.machine.threads import run_on, threads_for
from triforce_core.messages import GREEDY, SequenceSpec, Span
from triforce_core.models.runner import ModelRunner

log = logging.getLogger(__name__)

PADDINGS = (1, 2, 4, 8, 16)  # multiples of tokens that passes may be padded to; the first that holds is taken
# The tokens of the passes that compute the end of the text again: sizes of decoding passes of one text and of several,
# and of small chunks, among them those at which libraries change their kernels.
AGAIN = (129, 64, 32, 24, 17, 16, 12, 9, 8, 7, 5, 4, 3, 2, 1, 1)
LEAST_TOKENS = 1024  # of the text, if there is room: more than a block of keys
SEQUENCE = 1  # the id of the only sequence


def make_exact(runner: ModelRunner, kv: FullKV, settings: Settings) -> str:
    """Give the runner the smallest padding with which its passes are exact; "" if there is one. Otherwise returns why
    not, and the cache attends as without `exact`. Raises `InvalidValueError` then if the settings demand it.

    `kv` must be empty, and is empty afterwards.
    """
    why = settings.inexact
    if not why:
        tried = (ModelRunner(runner.model, kv, padding=padding) for padding in PADDINGS)
        found = next((each.padding for each in tried if is_exact(each, kv, settings)), None)
        if found is not None:
            runner.padding = found
            return ""
        why = "on this machine the bits of a token depend on the number of tokens in the pass"
    kv.in_blocks = False
    if settings.exact == "on":
        raise InvalidValueError("exact", "on", f"cannot be kept: {why}")
    log.info("exact: not kept, because %s: ties of rounding may be decided differently from pass to pass", why)
    return why


def is_exact(runner: ModelRunner, kv: FullKV, settings: Settings) -> bool:
    """Whether the runner's passes over the last tokens of a text, on any number of threads that it may choose, compute
    the bits that one pass over the whole text computes.
    """
    length = min(max(LEAST_TOKENS, settings.target.prefill_chunk), kv.allocator.num_slots)
    length = min(length, runner.model.config.max_position_embeddings)
    threads = threads_for(settings)
    counts = [threads.most >> halved for halved in range(threads.most.bit_length() if threads.chosen else 1)]
    number, vocabulary = random.Random(0), runner.model.config.vocab_size
    text = tuple(number.randrange(vocabulary) for _ in range(length))
    before, shares = torch.get_num_threads(), kv.shares
    kv.shares = False  # no request may find this text
    try:
        opened = kv.open(SEQUENCE, SequenceSpec(GREEDY, 0, length, length), length)
        assert opened is not None, "the pool is empty, and has room for a text of this length"
        run_on(threads.most)
        whole = runner.forward([Forward(Span(SEQUENCE, 0, text), min(length, sum(AGAIN)))])[0]
        return all(torch.equal(whole, computed_again(runner, text, count)) for count in counts)
    finally:
        run_on(before)
        kv.release(SEQUENCE)
        kv.shares = shares


def computed_again(runner: ModelRunner, text: tuple[int, ...], threads: int) -> Tensor:
    """The logits of the text's last tokens, [tokens, vocab] float32, in passes of `AGAIN`."""
    run_on(threads)
    edges = [max(0, len(text) - sum(AGAIN[index:])) for index in range(len(AGAIN) + 1)]
    passes = [(start, stop) for start, stop in pairwise(edges) if start < stop]
    return torch.cat(
        [runner.forward([Forward(Span(SEQUENCE, a, text[a:b]), b - a)])[0] for a, b in passes],
    )


def exact_fingerprint(fingerprint: str, settings: Settings) -> str:
    """The fingerprint of an exact target, whose tokens depend on this machine's arithmetic, too. `fingerprint`: of its
    settings and files.
    """
    here = [torch.__version__, transformers.__version__, str(settings.fused)]
    if settings.device_type == "cuda":
        here.append(torch.cuda.get_device_name(settings.device))
    else:
        here += [cpu_vendor(), torch.backends.cpu.get_cpu_capability(), *sorted(cpu_flags() & {*TELLING})]
    return f"{fingerprint}_exact_{blake2b(json.dumps(here).encode(), digest_size=2).hexdigest()}"
