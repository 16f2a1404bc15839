"""The measurement itself: every cache over every input, against the full cache. Each input is read once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from triforce_core.engine.engine import Engine, run_to_end
from triforce_core.engine.sequence import Request
from triforce_core.evaluation.caches import Case
from triforce_core.evaluation.measures import Counts, Scored
from triforce_core.evaluation.reading import Reading
from triforce_core.evaluation.texts import Input
from triforce_core.messages import GREEDY

Group = tuple[Any, ...]  # see Input
Results = dict[tuple[Case, Group], Counts]
Open = Callable[[Input], Reading]


class Watch(Protocol):
    """Who is told how far the evaluation is."""

    def begin(self, name: str) -> None: ...


def measure(inputs: Sequence[Input], cases: Sequence[Case], read: Open, watch: Watch) -> Results:
    """The counts of each case over each group of inputs. `read` gives a fresh full cache for an input."""
    results: Results = {}
    for text in inputs:
        watch.begin(text.name)
        reading = read(text)
        opened = [(case, case.open(reading, text)) for case in cases]
        for stretch in text.stretches:
            # The full cache, the first case, comes last: it goes on behind the place where the others are cut.
            own = [(case, Scored.at(stretch.start, logits(stretch))) for case, logits in reversed(opened)]
            exact = Scored.at(stretch.start, reading.logits(stretch))
            for case, scored in own:
                counts = Counts.of(exact, scored, stretch.predicted(text.tokens))
                results[case, text.group] = results.get((case, text.group), Counts()) + counts
    return results


def measure_triforce(
    inputs: Sequence[Input], engine: Engine, lookaheads: tuple[int, int], read: Open, watch: Watch
) -> dict[str, Any]:
    """The first stretch of each input, decoded greedily by the whole engine with these lookaheads, and token by token
    with the full cache alone: what both write, and how often that is the text.
    """
    texts = tokens = same = right = right_full = rounds = 0
    for text in inputs:
        watch.begin(f"TriForce: {text.name}")
        stretch = text.stretches[0]
        truth = list(stretch.predicted(text.tokens))
        request = Request(text.tokens[: stretch.start + 1], len(truth), GREEDY, 0, lookaheads)
        outputs = list(run_to_end(engine, [request]))
        own = [token for output in outputs for token in output.tokens]
        full = read(text).written(stretch.start, len(truth))
        texts, tokens, same = texts + 1, tokens + len(truth), same + (own == full)
        right, right_full = right + (own == truth), right_full + (full == truth)
        rounds += outputs[-1].stats.speculative_rounds
    return {
        "texts": texts,
        "tokens": tokens,
        "speculative_rounds": rounds,
        "same_text": same / texts,
        "recall": right / texts,
        "recall_full": right_full / texts,
    }
