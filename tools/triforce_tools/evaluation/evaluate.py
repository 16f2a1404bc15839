"""`triforce eval`: loads the models, measures every cache over every input against the full cache, and gathers the
figures. Each input is read once.
"""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch

from triforce_core import __version__
from triforce_core.building.inspection import runners_of
from triforce_core.building.loading import load_local_engine
from triforce_core.config import Settings
from triforce_core.engine.engine import Engine, run_to_end
from triforce_core.engine.sequence import Request
from triforce_core.errors import require
from triforce_core.machine.cpu import cpu_summary
from triforce_core.messages import GREEDY, Tier
from triforce_core.models.files import context_length, load_config, load_tokenizer
from triforce_tools.bench.pairs import speculative_rounds
from triforce_tools.evaluation.batches import KINDS, check_batches, free_memory, measure_batches
from triforce_tools.evaluation.caches import CACHES, CUT, DRAFT, TRIFORCE, Case, Reading, cases_of
from triforce_tools.evaluation.measures import Counts, Exact
from triforce_tools.evaluation.plan import EvalPlan
from triforce_tools.evaluation.texts import Group, Input, held_out_inputs, needle_inputs

WRITTEN = 32  # tokens at least in which all tiers together are compared with the full cache
CHOICE_BUDGET = 1024  # the budget at which selectors compete: the default of `retrieval.budget`

Row = dict[str, Any]
Sums = dict[Case, dict[Group, Counts]]


class Evaluation:
    """The inputs of a plan, checked and made before a model is loaded."""

    def __init__(self, settings: Settings, plan: EvalPlan) -> None:
        """Raises `InvalidValueError`: the plan names an unknown cache, or lengths that do not fit the model or the
        files.
        """
        settings.target.require_lossless("the full cache is what all others are compared with")
        self.settings, self.plan = settings, plan
        self.cases = cases_of(plan, settings)
        self.with_whole = TRIFORCE in plan.caches or not plan.caches
        self.selectors = [name for name in plan.caches or CUT if name in CUT]
        chunk = settings.retrieval.chunk
        least = 4 * max(chunk, 2)  # sinks, recent tokens and something to choose; more than StreamingLLM's four sinks
        for budget in plan.budgets:
            fits = budget % chunk == 0 and budget >= least
            require(fits, "budgets", budget, f"must be a multiple of the chunk, {chunk}, and {least} at least")
        longest = context_length(load_config(settings.target.model, "target"))
        greatest = max(plan.lengths)
        require(greatest <= longest, "lengths", greatest, f"must fit the context of {longest} tokens")
        tokenizer = load_tokenizer(settings.target.model)
        self.needles = needle_inputs(tokenizer, plan) if "needle" in plan.tasks else []
        self.files: list[Input] = []
        self.prompts: list[tuple[int, ...]] = []
        if plan.tasks == ("needle",):
            return
        rule = f"and {plan.end - plan.context} scored tokens after it, with one more, must fit the context of {longest}"
        require(plan.end < longest, "context", plan.context, rule)
        files = held_out_inputs(tokenizer, plan)
        if "acceptance" in plan.tasks:
            self.files = files
        if "batch" in plan.tasks:
            check_batches(settings, plan.context, longest)
            self.prompts = [text.tokens[: plan.context] for text in files]

    @property
    def steps(self) -> int:
        """How many times `begin` is called."""
        return len(self.files) + len(self.needles) + (len(KINDS) if self.prompts else 0)

    def run(self, begin: Callable[[str], None]) -> dict[str, Any]:
        """The figures, with what they depend on. `begin` is told what is measured next."""
        figures: dict[str, Any] = {
            "plan": asdict(self.plan),
            "machine": {"cpu": cpu_summary(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
            "versions": {"triforce": __version__, "torch": version("torch"), "transformers": version("transformers")},
            "settings": self.settings.model_dump(mode="json"),
            "triforce": {},
        }
        if self.prompts:  # before the engine of the other tasks takes memory
            figures["batches"] = measure_batches(self.settings, self.prompts, begin)
            free_memory(self.settings)
        if not self.files and not self.needles:
            return figures
        drafting = True if Case(DRAFT) in self.cases else None if self.with_whole else False
        engine = load_local_engine(self.settings, drafting=drafting)
        runners = runners_of(engine)
        runners.setdefault(Tier.RETRIEVAL, runners[Tier.TARGET])  # where the settings have no retrieval tier
        for name, inputs in (("files", self.files), ("needles", self.needles)):
            if not inputs:
                continue
            sums: Sums = {case: defaultdict(Counts) for case in self.cases}
            whole: Counter[str] = Counter()
            for text in inputs:
                begin(text.name)
                reading = Reading(runners, self.settings, text.tokens, self.selectors)
                add_counts(sums, text, reading)
                if self.with_whole:
                    whole.update(compare_texts(engine, self.settings.speculation.effective, text))
            figures[name] = [
                {"cache": case.cache, "budget": case.budget or None} | dict(group) | counts.figures()
                for case, groups in sums.items()
                for group, counts in groups.items()
            ]
            if self.with_whole:
                figures["triforce"][name] = dict(whole)
        if self.files:
            figures["choice"] = choose(figures["files"], self.selectors)
        return figures


def add_counts(sums: Sums, text: Input, reading: Reading) -> None:
    """Add what each case counts over the text, of which `reading` has read nothing yet."""
    opened = {case: CACHES[case.cache](reading, text, case.budget) for case in sums}
    for stretch in text.stretches:
        # The full cache is the first case but is read last, because reading moves it past the position where the
        # others are cut.
        logits = {case: opened[case](stretch) for case in reversed(opened)}
        exact = Exact(stretch.start, reading.logits(stretch))
        for case, groups in sums.items():
            counts = Counts.of(exact, logits[case], stretch.predicted(text.tokens))
            for group in text.groups:
                groups[group] += counts


def compare_texts(engine: Engine, lookaheads: tuple[int, int], text: Input) -> dict[str, int]:
    """What all tiers together write greedily from the first stretch on, against the full cache alone: they must be the
    same.
    """
    stretch = text.stretches[0]
    # The answer to a needle input has few tokens; what is written after it is compared too.
    count = min(max(stretch.stop - stretch.start, WRITTEN), engine.limits.longest_output(stretch.start + 1))

    def written(lookaheads: tuple[int, int]) -> tuple[list[int], int]:
        request = Request(text.tokens[: stretch.start + 1], count, GREEDY, 0, lookaheads)
        outputs = list(run_to_end(engine, [request]))
        return [token for output in outputs for token in output.tokens], speculative_rounds(outputs[-1].stats)

    own, rounds = written(lookaheads)
    return {"texts": 1, "same": own == written((0, 0))[0], "tokens": len(own), "speculative_rounds": rounds}


def choose(rows: Sequence[Row], selectors: Sequence[str]) -> dict[str, Any] | None:
    """The selector with the highest acceptance at temperature 0 on half A of the files, and its acceptance on half B.
    So the choice and the figure of half B do not rest on the same files.

    Returns:
        None where no selector was measured at the budget. `error` is the standard error at T = 0 if tokens were
        independent; as those of one file resemble each other, it is rather more.
    """
    halves: dict[str, dict[str, Row]] = {"A": {}, "B": {}, "all": {}}
    for row in rows:
        if row["budget"] == CHOICE_BUDGET and row["cache"] in selectors:
            rate = row["acceptance"]["T0"]
            halves[row["half"]][row["cache"]] = row["acceptance"] | {
                "error": math.sqrt(rate * (1 - rate) / row["tokens"])
            }
    if not halves["A"]:
        return None
    best = max(halves["A"], key=lambda name: float(halves["A"][name]["T0"]))
    return {"budget": CHOICE_BUDGET, "selector": best, "half_a": halves["A"][best], "half_b": halves["B"][best]}
