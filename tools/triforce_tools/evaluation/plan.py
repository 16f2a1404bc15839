"""What an evaluation measures: its tasks, caches, budgets and lengths. Does not load torch."""

from __future__ import annotations

from dataclasses import dataclass

from triforce_core.errors import require

TASKS = ("needle", "acceptance", "batch")


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """The extent of an evaluation; figures of different plans are not comparable. Sizes are in tokens."""

    tasks: tuple[str, ...] = ("needle", "acceptance")
    caches: tuple[str, ...] = ()  # names in caches.py; none: all of them
    budgets: tuple[int, ...] = (256, 512, 1024, 4096)  # of each sparse cache, per layer and KV head
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)  # of needle inputs
    documents: int = 18  # held-out files, in two halves
    context: int = 8192  # of each file, read before the scored tokens
    scored: int = 64  # in each stretch after them: as many as lie between two snapshots
    stretches: int = 2  # of each file, one after the other
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75)  # of the needle of inputs with one key, as a share of the length
    probes: int = 2  # needle inputs of each length with one key at each depth, and with many keys
    keys: int = 8  # of an input with many keys, all asked for; as many more are distractors
    seed: int = 0  # of the needle inputs

    def __post_init__(self) -> None:
        for name, values in (("task", self.tasks), ("budgets", self.budgets), ("lengths", self.lengths)):
            require(bool(values), name, "", "must name one at least")
            require(len(set(values)) == len(values), name, list(map(str, values)), "must name each value once")
        for task in self.tasks:
            require(task in TASKS, "task", task, f"must be one of {', '.join(TASKS)}")
        rule = "must be at least 512 tokens, to have room for keys and questions"
        require(min(self.lengths) >= 512, "lengths", min(self.lengths), rule)
        require(self.documents >= 2, "documents", self.documents, "must be at least 2, one for each half")
        require(self.context >= 64, "context", self.context, "must be at least 64 tokens")
        require(self.probes >= 1, "probes", self.probes, "must be at least 1")

    @property
    def end(self) -> int:
        """Where the last stretch of a file stops."""
        return self.context + self.scored * self.stretches


def listed(text: str) -> tuple[str, ...]:
    """The values of an option that takes several, separated by commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(name: str, text: str) -> tuple[int, ...]:
    """The numbers of tokens that the option of this name lists."""
    for value in listed(text):
        require(value.isascii() and value.isdigit(), name, value, "must be whole numbers of tokens: 1024,8192")
    return tuple(map(int, listed(text)))
