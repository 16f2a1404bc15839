"""Whether a target computes the same bits for a token whatever else is in the pass: it is tried at start.

Attention in blocks does so by its form (attention/blocks.py). Products need not: libraries choose their kernels by the
number of rows, and by the machine. docs/decisions/0032-bits.md
"""

import json
import logging
import random
from collections.abc import Iterator
from hashlib import blake2b
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from triforce_core.config import Settings
from triforce_core.errors import InvalidValueError
from triforce_core.kv.base import Forward
from triforce_core.kv.full import FullKV
from triforce_core.machine.cpu import TELLING, cpu_flags, cpu_vendor, usable_cores
from triforce_core.machine.threads import run_on
from triforce_core.messages import GREEDY, SequenceSpec, Span
from triforce_core.models.runner import ModelRunner

log = logging.getLogger(__name__)

PADDINGS = (1, 2, 4, 8, 16)  # multiples of tokens that passes may be padded to; the first that holds is taken
# The tokens of the passes at the end of the text, whose logits are compared: sizes of decoding passes, of the batches
# of several texts, and of chunks.
LAST = (129, 65, 33, 17, 12, 9, 8, 7, 5, 4, 3, 2, 1, 1)
COMPARED = sum(LAST[3:])
LEAST_TOKENS = 640  # of the text, if there is room: more than a block of keys
SEQUENCE = 1  # the id of the only sequence


def make_exact(runner: ModelRunner, kv: FullKV, settings: Settings) -> str:
    """Give the runner the smallest padding with which its passes are exact; "" if there is one. Otherwise returns why
    not, and the cache attends as without `exact`. Raises `InvalidValueError` then if the settings demand it.

    `kv` must be empty, and is empty afterwards.
    """
    why = settings.inexact
    if not why:
        tried = (ModelRunner(runner.model, kv, padding=padding) for padding in PADDINGS)
        found = next((each.padding for each in tried if is_exact(each, settings)), None)
        if found is not None:
            runner.padding = found
            return ""
        why = "on this machine the bits of a token depend on the number of tokens in the pass"
    kv.in_blocks = False
    if settings.exact == "on":
        raise InvalidValueError("exact", "on", f"cannot be kept: {why}")
    log.info("exact: not kept, because %s: ties of rounding may be decided differently from pass to pass", why)
    return why


def is_exact(runner: ModelRunner, settings: Settings) -> bool:
    """Whether this runner, whose cache is a `FullKV`, computes the same bits in one pass as in passes of `LAST`, with
    the least and the most threads that passes run on.
    """
    kv = runner.kv
    assert isinstance(kv, FullKV)
    longest_pass = max(LEAST_TOKENS, settings.target.prefill_chunk)
    length = min(longest_pass, kv.allocator.num_slots, runner.model.config.max_position_embeddings)
    edges = [edge for edge in accumulate(reversed(LAST), lambda stop, size: stop - size, initial=length) if edge > 0]
    before = torch.get_num_threads()
    most = settings.threads or usable_cores()
    try:
        whole = logits_of(runner, [0, length], most)
        least = 1 if settings.chooses_threads else most
        return all(torch.equal(whole, logits_of(runner, [0, *edges[::-1]], threads)) for threads in {most, least})
    finally:
        run_on(before)


def logits_of(runner: ModelRunner, edges: list[int], threads: int) -> Tensor:
    """The logits of the last tokens of a text, [tokens, vocab] float32, computed in passes between these positions."""
    kv, length, number = runner.kv, edges[-1], random.Random(0)
    assert isinstance(kv, FullKV)
    vocabulary = runner.model.config.vocab_size
    text = tuple(number.randrange(vocabulary) for _ in range(length))
    spec = SequenceSpec(GREEDY, 0, length, length)
    opened = kv.open(SEQUENCE, spec, length)
    assert opened is not None, "the pool is empty, and has room for a text of this length"
    run_on(threads)
    try:
        return torch.cat([*passes(runner, text, edges)])
    finally:
        kv.release(SEQUENCE)
        kv.tree.drop_until(lambda: False)  # no request may find it


def passes(runner: ModelRunner, text: tuple[int, ...], edges: list[int]) -> Iterator[Tensor]:
    first = len(text) - COMPARED
    for start, stop in pairwise(edges):
        span = Span(SEQUENCE, start, text[start:stop])
        yield runner.forward([Forward(span, max(0, stop - max(start, first)))])[0]


def exact_fingerprint(fingerprint: str, device: str) -> str:
    """The fingerprint of an exact target, whose tokens depend on this machine's arithmetic, too. `fingerprint`: of its
    settings and files.
    """
    here = [torch.__version__, cpu_vendor(), torch.backends.cpu.get_cpu_capability(), *sorted(cpu_flags() & {*TELLING})]
    if device.startswith("cuda"):
        here = [torch.__version__, torch.cuda.get_device_name(device)]
    return f"{fingerprint}_exact_{blake2b(json.dumps(here).encode(), digest_size=2).hexdigest()}"
