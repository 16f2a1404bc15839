"""On how many CPU threads the passes of a model run. Does not load transformers."""

from typing import NamedTuple

import torch

from triforce_core.config import Settings

ALL_THREADS = torch.get_num_threads()  # before any pass has changed it


class Threads(NamedTuple):
    """CPU threads of a pass over few tokens, and of one over many."""

    decode: int
    prefill: int


def threads_for(settings: Settings) -> Threads:
    """The threads in the settings, or all, divided over the ranks, until those for decoding are measured."""
    threads = settings.threads or max(1, ALL_THREADS // settings.ranks(("target", "retrieval")))
    return Threads(decode=threads, prefill=threads)


def run_on(threads: int) -> None:
    """Have the operators that this thread calls run on `threads` CPU threads."""
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
