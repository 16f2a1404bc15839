"""The inputs of an evaluation: held-out files in two halves, and files with keys planted in them that are asked for at
the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from triforce_core.errors import require
from triforce_tools.bench.prompts import HELD_OUT, held_out_path, held_out_tokens
from triforce_tools.demo_training.corpus import Tokens
from triforce_tools.demo_training.evaluate import answer_runs
from triforce_tools.demo_training.recall import RecallTasks, recall_probe
from triforce_tools.evaluation.plan import EvalPlan

QUESTIONS = 32  # tokens that a question and its answer take at most
ONE_KEY, MANY_KEYS = "one key", "many keys"


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens that are predicted one by one: sparse caches hold the text below `start`, and the logits of the positions
    from `start` to `stop` predict the tokens that follow each.
    """

    start: int
    stop: int
    seen: int  # selectors choose by the queries below this position: `start`, or one more

    def predicted(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        return tokens[self.start + 1 : self.stop + 1]


@dataclass(frozen=True, slots=True)
class Input:
    """A text and its predicted stretches, in order."""

    name: str
    tokens: tuple[int, ...]
    stretches: tuple[Stretch, ...]
    group: tuple[Any, ...]  # results are summed over the inputs of a group


def held_out_inputs(tokenizer: Any, plan: EvalPlan) -> list[Input]:
    """The first tokens of held-out files, each with its stretches at the end. Files alternate between the two halves,
    so their group is "A" or "B".

    Raises:
        InvalidValueError: there are fewer files than the plan asks for, or one of them is too short.
    """
    require(plan.documents <= len(HELD_OUT), "documents", plan.documents, f"must be at most {len(HELD_OUT)} files")
    starts = [plan.context + plan.scored * number for number in range(plan.stretches)]
    length = plan.end + 1
    inputs = []
    for number, name in enumerate(HELD_OUT[: plan.documents]):
        tokens = tokenizer(held_out_path(name).read_text(encoding="utf-8"))["input_ids"]
        more = length - plan.context
        rule = f"must be at most {len(tokens) - more}: {name} has {len(tokens)} tokens, and {more} are needed after it"
        require(len(tokens) >= length, "context", plan.context, rule)
        stretches = tuple(Stretch(start, start + plan.scored, seen=start) for start in starts)
        inputs.append(Input(name, tuple(tokens[:length]), stretches, ("AB"[number % 2],)))
    return inputs


def needle_inputs(tokenizer: Any, plan: EvalPlan) -> list[Input]:
    """Files with keys and values planted in them, and questions for the keys at the end. A stretch is an answer, and
    selectors see the whole question, as they do when a prompt ends with it.

    Inputs with one key have it at each depth of the plan. Inputs with many keys have them at the start. The tasks are
    those that the demo pair is measured on (demo_training/recall.py). Groups are (kind, length, depth).
    """
    tasks = RecallTasks(tokenizer.backend_tokenizer)
    files = np.array(held_out_tokens(tokenizer, 2 * max(plan.lengths) + 1), dtype=tasks.dtype)
    opening = np.array(tokenizer("")["input_ids"], dtype=tasks.dtype)  # what the tokenizer begins every text with
    inputs = []
    for length in plan.lengths:
        for kind, depth, asked, others in (
            *((ONE_KEY, depth, 1, 0) for depth in plan.depths),
            (MANY_KEYS, 0.0, plan.keys, plan.keys),
        ):
            for number in range(plan.probes):
                seeds = (plan.seed, length, round(1000 * depth), asked, number)
                tokens, answers = _probe(
                    np.random.default_rng(seeds), tasks, files, opening, length, depth, asked, others
                )
                stretches = tuple(Stretch(answer.start - 1, answer.stop - 1, seen=answer.start) for answer in answers)
                inputs.append(Input(f"{kind} {length} {depth:g} {number}", tokens, stretches, (kind, length, depth)))
    return inputs


def _probe(
    rng: np.random.Generator,
    tasks: RecallTasks,
    files: Tokens,
    opening: Tokens,
    length: int,
    depth: float,
    asked: int,
    others: int,
) -> tuple[tuple[int, ...], list[slice]]:
    """The tokens of an input, at most `length`, and where the answers are: `asked` keys at `depth`, `others` after
    them.
    """
    body = length - len(opening) - QUESTIONS * asked
    before = int(depth * body)
    first = int(rng.integers(len(files) - body))
    text = files[first : first + body]
    probe = recall_probe(rng, tasks, text[before:], body - before, questions=asked, distractors=others)
    ids = np.concatenate([opening, text[:before], probe.ids])[:length]
    answers = [
        slice(answer.start + len(opening) + before, answer.stop + len(opening) + before)
        for answer in answer_runs(probe.is_answer)
    ]
    return tuple(ids.tolist()), [answer for answer in answers if answer.stop <= len(ids)]
