"""What an evaluation measures: its tasks, caches, budgets and lengths. Does not load torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triforce_core.errors import require

TASKS = ("needle", "perplexity", "agreement", "acceptance", "cost", "batch")
TIMED = frozenset({"cost", "batch"})
LEAST_CHUNKS = 4  # of a budget: sinks, recent tokens, and something to choose
ON_FILES = frozenset({"perplexity", "agreement", "acceptance"})  # tasks on stretches of held-out files


def least_budget(chunk: int) -> int:
    """The fewest tokens of a budget. With chunks of one token it is more than StreamingLLM's sinks too."""
    return LEAST_CHUNKS * max(chunk, 2)


@dataclass(frozen=True, slots=True)
class Budget:
    """A sparse cache's budget per layer and KV head: a number of tokens, or a share of the context."""

    amount: int
    is_percent: bool = False

    @classmethod
    def parse(cls, text: str) -> Budget:
        """The budget that `1024` or `5%` names."""
        number = text.removesuffix("%")
        rule = "must be tokens such as 1024, or a share of the context such as 5%"
        require(number.isascii() and number.isdigit() and int(number) > 0, "budgets", text, rule)
        budget = cls(int(number), text.endswith("%"))
        require(not budget.is_percent or budget.amount <= 100, "budgets", text, "must be at most 100%")
        return budget

    @property
    def name(self) -> str:
        return f"{self.amount}%" if self.is_percent else str(self.amount)

    def tokens(self, context: int, chunk: int) -> int:
        """This budget in tokens, rounded down to whole chunks, for a context of so many tokens."""
        wanted = context * self.amount // 100 if self.is_percent else self.amount
        return max(least_budget(chunk), wanted // chunk * chunk)


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """The extent of an evaluation; figures of different plans are not comparable. Lengths are in tokens."""

    tasks: tuple[str, ...] = ("needle", "perplexity", "agreement", "acceptance")
    caches: tuple[str, ...] = ()  # names in caches.py; none: all of them
    budgets: tuple[Budget, ...] = (
        *map(Budget, (256, 512, 1024, 4096)),
        *(Budget(share, True) for share in (5, 10, 20)),
    )
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)  # of needle inputs, and contexts of the costs
    documents: int = 18  # held-out files, in two halves
    context: int = 8192  # tokens of each file that are read before the scored ones
    scored: int = 64  # tokens of each stretch after them: as many as lie between two snapshots
    stretches: int = 2  # of each file, one after the other
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75)  # of the needle of inputs with one key, as a share of the length
    probes: int = 2  # needle inputs of each length with one key at each depth, and with many keys
    keys: int = 8  # of an input with many keys, all asked for; as many more are distractors
    seed: int = 0  # of the needle inputs

    def __post_init__(self) -> None:
        require(bool(self.tasks), "task", "", f"must name some of {', '.join(TASKS)}")
        for task in self.tasks:
            require(task in TASKS, "task", task, f"must be one of {', '.join(TASKS)}")
        require(bool(self.budgets), "budgets", "", "must name one at least")
        for name, values in (("task", self.tasks), ("budgets", self.budgets), ("lengths", self.lengths)):
            require(len(set(values)) == len(values), name, list(map(str, values)), "must name each value once")
        require(bool(self.lengths), "lengths", "", "must name one at least")
        for length in self.lengths:
            require(
                length >= 512, "lengths", length, "must be at least 512 tokens, to have room for keys and questions"
            )
        require(self.documents >= 2, "documents", self.documents, "must be at least 2, one for each half")
        require(self.context >= 64, "context", self.context, "must be at least 64 tokens")
        require(self.probes >= 1, "probes", self.probes, "must be at least 1")

    @property
    def end(self) -> int:
        """Where the last stretch of a file stops."""
        return self.context + self.scored * self.stretches

    @property
    def reads_files(self) -> bool:
        return bool((ON_FILES | {"batch"}) & set(self.tasks))

    def record(self) -> dict[str, Any]:
        """The plan as JSON holds it."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return fields | {"budgets": [budget.name for budget in self.budgets]}


def listed(text: str) -> tuple[str, ...]:
    """The values of an option that takes several, separated by commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def parse_lengths(text: str) -> tuple[int, ...]:
    values = listed(text)
    for value in values:
        require(value.isascii() and value.isdigit(), "lengths", value, "must be whole numbers of tokens: 1024,8192")
    return tuple(map(int, values))
