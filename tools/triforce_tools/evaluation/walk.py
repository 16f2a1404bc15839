"""The measurement itself: every cache over every input, against the full cache. Each input is read once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from triforce_core.engine.engine import Engine, run_to_end
from triforce_core.engine.sequence import Request
from triforce_core.messages import GREEDY
from triforce_tools.bench.pairs import speculative_rounds
from triforce_tools.evaluation.caches import Case
from triforce_tools.evaluation.measures import Counts, Scored
from triforce_tools.evaluation.reading import WRITTEN, Reading
from triforce_tools.evaluation.texts import Input

Group = tuple[Any, ...]  # see Input
Results = dict[tuple[Case, Group], Counts]
Open = Callable[[Input], Reading]


class Watch(Protocol):
    """Is told of the evaluation's progress."""

    def begin(self, name: str) -> None: ...


@dataclass(slots=True)
class Whole:
    """The whole engine against the full cache alone: what both write greedily from an input's first stretch on."""

    engine: Engine
    lookaheads: tuple[int, int]
    inputs: Collection[Input]
    texts: int = 0
    tokens: int = 0
    speculative_rounds: int = 0
    same: int = 0  # texts that are equal
    right: int = 0  # texts of the engine that are the input's own
    right_full: int = 0  # the same of the full cache

    def add(self, text: Input, reading: Reading) -> None:
        stretch = text.stretches[0]
        truth = list(stretch.predicted(text.tokens))
        # The answer to a needle input has few tokens; what is written after it is compared too.
        count = min(max(len(truth), WRITTEN), self.engine.limits.longest_output(stretch.start + 1))
        request = Request(text.tokens[: stretch.start + 1], count, GREEDY, 0, self.lookaheads)
        outputs = list(run_to_end(self.engine, [request]))
        own = [token for output in outputs for token in output.tokens]
        full = reading.written(stretch.start, count)
        self.texts += 1
        self.tokens += len(own)
        self.speculative_rounds += speculative_rounds(outputs[-1].stats)
        self.same += own == full
        self.right += own[: len(truth)] == truth
        self.right_full += full[: len(truth)] == truth

    def figures(self) -> dict[str, Any]:
        return {
            "texts": self.texts,
            "tokens": self.tokens,
            "speculative_rounds": self.speculative_rounds,
            "same_text": self.same / self.texts,
            "recall": self.right / self.texts,
            "recall_full": self.right_full / self.texts,
        }


def measure(inputs: Sequence[Input], cases: Sequence[Case], read: Open, watch: Watch, whole: Whole | None) -> Results:
    """The counts of each case over each group of inputs, and those of `whole`. `read` gives an empty full cache for an
    input.
    """
    results: Results = {}
    for text in inputs:
        watch.begin(text.name)
        reading = read(text)
        opened = [(case, case.open(reading, text)) for case in cases]
        for stretch in text.stretches:
            # The full cache is the first case but is read last, because reading moves it past the position where the
            # others are cut.
            own = [(case, Scored.at(stretch.start, logits(stretch))) for case, logits in reversed(opened)]
            exact = Scored.at(stretch.start, reading.logits(stretch))
            for case, scored in own:
                counts = Counts.of(exact, scored, stretch.predicted(text.tokens))
                results[case, text.group] = results.get((case, text.group), Counts()) + counts
        if whole is not None and text in whole.inputs:
            whole.add(text, reading)
    return results
