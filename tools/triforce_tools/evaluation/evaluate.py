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
from triforce_core.attention import kernel_for
from triforce_core.config import Settings
from triforce_core.engine.engine import Engine, run_to_end
from triforce_core.engine.inspection import runners_of
from triforce_core.engine.loading import load_local_engine
from triforce_core.engine.sequence import Request
from triforce_core.errors import require
from triforce_core.messages import GREEDY
from triforce_core.models.cpu import cpu_summary
from triforce_core.models.files import context_length, load_config, load_tokenizer
from triforce_core.models.load import kv_geometry
from triforce_core.models.threads import threads_for
from triforce_tools.bench.pairs import speculative_rounds
from triforce_tools.evaluation.batches import KINDS, check_batches, free_memory, measure_batches
from triforce_tools.evaluation.caches import CUT, DRAFT, TRIFORCE, Case, cases_of, open_case
from triforce_tools.evaluation.measures import Counts, Exact
from triforce_tools.evaluation.plan import EvalPlan
from triforce_tools.evaluation.reading import WRITTEN, Model, Reading
from triforce_tools.evaluation.texts import Group, Input, held_out_inputs, needle_inputs

WHOLE_FILES = 4  # held-out files that the whole engine decodes; it decodes all needle inputs
CHOICE_BUDGET = 1024  # the budget at which selectors compete: the default of `retrieval.budget`

Row = dict[str, Any]
Begin = Callable[[str], None]  # is told what is measured next


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
        for length in plan.lengths:
            require(length <= longest, "lengths", length, f"must fit the context of {longest} tokens")
        reads_files = "acceptance" in plan.tasks or "batch" in plan.tasks
        more = plan.end - plan.context
        rule = f"and {more} scored tokens after it, with one more, must fit the context of {longest} tokens"
        require(plan.end < longest or not reads_files, "context", plan.context, rule)
        if "batch" in plan.tasks:
            check_batches(settings, plan.context, longest)
        tokenizer = load_tokenizer(settings.target.model)
        files = held_out_inputs(tokenizer, plan) if reads_files else []
        self.prompts = [text.tokens[: plan.context] for text in files] if "batch" in plan.tasks else []
        self.files = files if "acceptance" in plan.tasks else []
        self.needles = needle_inputs(tokenizer, plan) if "needle" in plan.tasks else []

    @property
    def steps(self) -> int:
        """How many times `begin` is called."""
        return len(self.files) + len(self.needles) + (len(KINDS) if self.prompts else 0)

    def run(self, begin: Begin) -> dict[str, Any]:
        """The figures, with what they depend on."""
        figures: dict[str, Any] = {
            "plan": asdict(self.plan),
            "machine": {"cpu": cpu_summary(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
            "versions": {"triforce": __version__, "torch": version("torch"), "transformers": version("transformers")},
            "settings": self.settings.model_dump(mode="json"),
        }
        if self.prompts:  # before the engine of the other tasks takes memory
            figures["batches"] = measure_batches(self.settings, self.prompts, begin)
            free_memory(self.settings)
        if not self.files and not self.needles:
            return figures
        drafting = True if Case(DRAFT) in self.cases else None if self.with_whole else False
        engine = load_local_engine(self.settings, drafting=drafting)
        models = {tier: self._model(runner.model) for tier, runner in runners_of(engine).items()}

        def read(text: Input) -> Reading:
            return Reading(models, text.tokens, self.settings.retrieval.chunk, self.selectors)

        whole: dict[str, Any] = {}
        for name, inputs in (("files", self.files), ("needles", self.needles)):
            if not inputs:
                continue
            texts: Counter[str] = Counter()
            sums: dict[Case, dict[Group, Counts]] = {case: defaultdict(Counts) for case in self.cases}
            for number, text in enumerate(inputs):
                begin(text.name)
                reading = read(text)
                self.add_counts(sums, text, reading)
                if self.with_whole and (name == "needles" or number < WHOLE_FILES):
                    texts.update(compare_texts(engine, self.settings.speculation.effective, text, reading))
            figures[name] = [
                {"cache": case.cache, "budget": case.budget}
                | dict(group)
                | counts.figures()
                | (counts.recall() if name == "needles" else {})
                for case, groups in sums.items()
                for group, counts in groups.items()
            ]
            if self.with_whole:
                shares = {share: texts[share] / texts["texts"] for share in ("same_text", "recall", "recall_full")}
                whole[name] = {**texts, **shares}
        if self.files:
            figures["choice"] = choose(figures["files"], self.selectors)
        return figures | ({"triforce": whole} if whole else {})

    def add_counts(self, sums: dict[Case, dict[Group, Counts]], text: Input, reading: Reading) -> None:
        """Add what each case counts over the text, of which `reading` has read nothing yet."""
        opened = {case: open_case(case, reading, text, self.settings) for case in sums}
        for stretch in text.stretches:
            # The full cache is the first case but is read last, because reading moves it past the position where the
            # others are cut.
            logits = {case: opened[case](stretch) for case in reversed(opened)}
            exact = Exact(stretch.start, reading.logits(stretch))
            for case, groups in sums.items():
                counts = Counts.of(exact, logits[case], stretch.predicted(text.tokens))
                for group in text.groups:
                    groups[group] += counts

    def _model(self, model: Any) -> Model:
        kernel = kernel_for(self.settings, kv_geometry(model).head_dim)
        return Model(model, kernel, threads_for(self.settings))


def compare_texts(engine: Engine, lookaheads: tuple[int, int], text: Input, reading: Reading) -> dict[str, int]:
    """What the whole engine and the full cache alone write greedily from the first stretch on: whether it is the same,
    and whether either is the input's own text.
    """
    stretch = text.stretches[0]
    truth = list(stretch.predicted(text.tokens))
    # The answer to a needle input has few tokens; what is written after it is compared too.
    count = min(max(len(truth), WRITTEN), engine.limits.longest_output(stretch.start + 1))
    request = Request(text.tokens[: stretch.start + 1], count, GREEDY, 0, lookaheads)
    outputs = list(run_to_end(engine, [request]))
    own = [token for output in outputs for token in output.tokens]
    full = reading.written(stretch.start, count)
    return {
        "texts": 1,
        "tokens": len(own),
        "speculative_rounds": speculative_rounds(outputs[-1].stats),
        "same_text": own == full,
        "recall": own[: len(truth)] == truth,
        "recall_full": full[: len(truth)] == truth,
    }


def choose(rows: Sequence[Row], selectors: Sequence[str]) -> dict[str, Any] | None:
    """The selector with the highest acceptance at temperature 0 on half A of the files, and its acceptance on half B.
    So the choice and the figure of half B do not rest on the same files.

    Returns:
        None where no selector was measured at the budget. `error` is the standard error at T = 0 if tokens were
        independent; as those of one file resemble each other, it is rather more.
    """
    by_half: dict[str, dict[str, Row]] = {"A": {}, "B": {}, "all": {}}
    for row in rows:
        if row["budget"] == CHOICE_BUDGET and row["cache"] in selectors:
            rate = row["acceptance"]["T0"]
            error = {"error": math.sqrt(rate * (1 - rate) / row["tokens"])}
            by_half[row["half"]][row["cache"]] = row["acceptance"] | error
    if not by_half["A"]:
        return None
    best = max(by_half["A"], key=lambda name: float(by_half["A"][name]["T0"]))
    return {
        "budget": CHOICE_BUDGET,
        "selector": best,
        "half_a": by_half["A"][best],
        "half_b": by_half["B"][best],
    }
