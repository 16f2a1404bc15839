"""On how many CPU threads the passes of a model run: chosen while they run, by their times.

Which number is best depends on model, context, machine, and on what else its cores do: nothing but a trial tells. Does
not load transformers.
"""

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import TypeVar

import torch

from triforce_core.config import Settings
from triforce_core.costs import MANY_TOKENS
from triforce_core.machine.cpu import usable_cores

Found = TypeVar("Found")
Passes = Generator[int, float, list[float]]  # yields the threads of the next pass, and is sent its seconds

BLOCK, BLOCKS = 3, 2  # three passes with each of two numbers of threads, twice in turn
# More threads are kept only if a pass with them takes less than this share of its time with fewer: a smaller gain may
# be an error of measurement, and other processes may have a use for the cores.
TIE = 0.9
# Half and twice the number are tried again after `SETTLED` passes; the first time after `SOON`, because others may have
# had the cores, as at a start, and where one thread was as good as two, no pass tells when two would be better. Sooner
# still, if `FEW` in a row take clearly longer (`SLOWER`) than the first ones did.
SOON, SETTLED, FEW, SLOWER = 250, 1000, 16, 1.5


class Threads:
    """The CPU threads of one runner's passes. Those over `MANY_TOKENS` tokens or more use `most`. For shorter ones each
    size, in powers of two of tokens and of keys, has a number of its own: at first that of the pass before, then half
    of it for as long as passes take hardly longer (`TIE`), or twice of it for as long as that pays. Both are tried
    again from time to time and where passes become slower: the best number changes with the load of the machine.
    """

    def __init__(self, most: int, *, chosen: bool = True) -> None:
        """`chosen`: False: all passes use `most`."""
        self.most, self.chosen = most, chosen and most > 1
        self.latest = most  # of the latest short pass
        self.size: tuple[int, int] | None = None  # of the pass that runs, if its time counts
        self.trials: dict[tuple[int, int], Passes] = {}
        self.coming: dict[tuple[int, int], int] = {}  # the threads of the next pass of this size

    def of(self, tokens: int, keys: int) -> int:
        """The threads for a pass over this number of tokens, which reads this number of keys."""
        self.size = None
        if not self.chosen or tokens >= MANY_TOKENS:
            return self.most
        self.size = size = tokens.bit_length(), keys.bit_length()
        if size not in self.trials:
            self.trials[size] = chosen_by_time(self.latest, self.most)
            self.coming[size] = next(self.trials[size])
        self.latest = self.coming[size]
        return self.latest

    def took(self, seconds: float) -> None:
        """Record the time of the pass that ran on the threads that `of` told last."""
        if self.size is not None:
            self.coming[self.size] = self.trials[self.size].send(seconds)


def chosen_by_time(best: int, most: int) -> Passes:
    """The threads of passes of one size, one after another, without end; at first `best`."""
    settled = SOON
    while True:
        before = best
        while best > 1 and (yield from as_good(best // 2, best)):
            best //= 2
        if best == before:
            while best < most and not (yield from as_good(best, min(2 * best, most))):
                best = min(2 * best, most)
        usual = median((yield from timed(best, FEW)))
        for _ in range(settled // FEW):
            if median((yield from timed(best, FEW))) > SLOWER * usual:
                settled = SOON
                break
        else:
            settled = SETTLED


def as_good(fewer: int, more: int) -> Generator[int, float, bool]:
    """Whether a pass with `fewer` threads takes at most 1 / `TIE` times as long as with `more`."""
    times: dict[int, list[float]] = {more: [], fewer: []}
    for _ in range(BLOCKS):
        for threads, taken in times.items():
            yield threads  # the first pass after a change is not counted
            taken.extend((yield from timed(threads, BLOCK)))
    return TIE * median(times[fewer]) <= median(times[more])


def timed(threads: int, passes: int) -> Passes:
    """The seconds of these passes."""
    seconds = []
    for _ in range(passes):
        seconds.append((yield threads))
    return seconds


def threads_for(settings: Settings) -> Threads:
    """The threads in the settings, or one for each core that this process may use, divided over the ranks, from which
    those of short passes are chosen. PyTorch's own number is no guide: Ray sets it to one.
    """
    most = settings.threads or max(1, usable_cores() // settings.ranks(("target", "retrieval")))
    return Threads(most, chosen=settings.chooses_threads)


def run_on(threads: int) -> None:
    """Have the operators that this thread calls run on `threads` CPU threads."""
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def apart(work: Callable[[], Found]) -> Found:
    """What `work` returns or raises, from a thread of its own that ends with it.

    For what calls operators in a process whose passes run on another thread. GNU OpenMP gives each thread that calls
    them helpers, which wait for it as long as it lives. Once a process has more of both than cores, all waiting threads
    sleep at once, where they would first look out for work, and to wake one takes longer than many an operator.
    """
    with ThreadPoolExecutor(1) as one:
        return one.submit(work).result()
