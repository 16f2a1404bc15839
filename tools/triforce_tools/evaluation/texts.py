"""The inputs of an evaluation: held-out files in two halves, and files with keys planted in them that are asked for at
the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from triforce_core.errors import require
from triforce_tools.bench.prompts import HELD_OUT, held_out_path, held_out_tokens
from triforce_tools.demo_training.recall import RecallTasks
from triforce_tools.evaluation.plan import EvalPlan

QUESTIONS = 32  # tokens that a question and its answer take at most
ONE_KEY, MANY_KEYS = "one key", "many keys"

Group = tuple[tuple[str, Any], ...]  # (("half", "A"),): names and values of a row's fields


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
    groups: tuple[Group, ...]  # the rows that its results are summed in


def held_out_inputs(tokenizer: Any, plan: EvalPlan) -> list[Input]:
    """The first tokens of held-out files, each with its stretches at the end. Files alternate between two halves, A and
    B.

    Raises:
        InvalidValueError: there are fewer files than the plan asks for, or one of them is too short.
    """
    require(plan.documents <= len(HELD_OUT), "documents", plan.documents, f"must be at most {len(HELD_OUT)} files")
    starts = range(plan.context, plan.end, plan.scored)
    stretches = tuple(Stretch(start, start + plan.scored, seen=start) for start in starts)
    length, inputs = plan.end + 1, []
    for number, name in enumerate(HELD_OUT[: plan.documents]):
        tokens = tokenizer(held_out_path(name).read_text(encoding="utf-8"))["input_ids"]
        more = length - plan.context
        rule = f"must be at most {len(tokens) - more}: {name} has {len(tokens)} tokens, and {more} are needed after it"
        require(len(tokens) >= length, "context", plan.context, rule)
        halves: tuple[Group, ...] = ((("half", "AB"[number % 2]),), (("half", "all"),))
        inputs.append(Input(name, tuple(tokens[:length]), stretches, halves))
    return inputs


def needle_inputs(tokenizer: Any, plan: EvalPlan) -> list[Input]:
    """Files with keys and values planted in them, and questions for the keys at the end. A stretch is an answer, and
    selectors see the whole question, as they do when a prompt ends with it.

    Inputs with one key have it at each depth of the plan. Inputs with many keys have them at the start, and as many
    distractors anywhere after them. The tasks are those that the demo pair was trained with.
    """
    tasks = RecallTasks(tokenizer.backend_tokenizer)
    files = np.array(held_out_tokens(tokenizer, 2 * max(plan.lengths) + 1), dtype=tasks.dtype)
    opening = np.array(tokenizer("")["input_ids"], dtype=tasks.dtype)  # what the tokenizer begins every text with
    kinds = [*((ONE_KEY, depth, 1, 0) for depth in plan.depths), (MANY_KEYS, 0.0, plan.keys, plan.keys)]
    inputs = []
    for length, (kind, depth, asked, others), number in product(plan.lengths, kinds, range(plan.probes)):
        rng = np.random.default_rng((plan.seed, length, round(1000 * depth), asked, number))
        body = length - len(opening) - QUESTIONS * asked
        before = int(depth * body)
        first = int(rng.integers(len(files) - body))
        text = files[first : first + body]
        planted = tasks.tasks(rng, asked + others)
        definitions = [task.definition.ids for task in planted]
        room = max(0, body - before - sum(map(len, definitions)))
        between = np.split(text[before : before + room], np.sort(rng.integers(0, room + 1, size=others)))
        pieces = [opening, text[:before], *definitions[:asked], between[0]]
        for distractor, more in zip(definitions[asked:], between[1:], strict=True):
            pieces += [distractor, more]
        stretches = []
        for task in planted[:asked]:
            value = sum(map(len, pieces)) + np.flatnonzero(task.question.is_value)
            pieces.append(task.question.ids)
            if value[-1] < length:
                stretches.append(Stretch(int(value[0]) - 1, int(value[-1]), seen=int(value[0])))
        tokens = tuple(np.concatenate(pieces)[:length].tolist())
        groups: tuple[Group, ...] = tuple(
            (("kind", of_kind), ("length", length), ("depth", at)) for of_kind, at in ((kind, depth), ("all", None))
        )
        inputs.append(Input(f"{kind} {length} {depth:g} {number}", tokens, tuple(stretches), groups))
    return inputs
