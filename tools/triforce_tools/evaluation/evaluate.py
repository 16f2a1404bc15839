"""`triforce eval`: loads the pair, runs the tasks of a plan, and gathers their figures."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any

import torch

from triforce_core import __version__
from triforce_core.attention import kernel_for
from triforce_core.config import Settings
from triforce_core.engine.inspection import runners_of
from triforce_core.engine.loading import load_local_engine
from triforce_core.errors import require
from triforce_core.messages import Tier
from triforce_core.models.cpu import cpu_summary
from triforce_core.models.files import context_length, load_config, load_tokenizer
from triforce_core.models.load import kv_geometry
from triforce_core.models.threads import threads_for
from triforce_tools.evaluation.batches import KINDS, check_batches, free_memory, measure_batches
from triforce_tools.evaluation.caches import CUT, TRIFORCE, cases_of, selectors_of
from triforce_tools.evaluation.choice import PUBLISHED, choose
from triforce_tools.evaluation.costs import measure_costs, measure_prefills
from triforce_tools.evaluation.measures import Counts
from triforce_tools.evaluation.plan import ON_FILES, EvalPlan, least_budget
from triforce_tools.evaluation.reading import Model, Reading
from triforce_tools.evaluation.texts import Input, held_out_inputs, needle_inputs
from triforce_tools.evaluation.walk import Results, Watch, Whole, measure

WHOLE_FILES = 4  # held-out files that the whole engine decodes; it decodes all needle inputs


class Evaluation:
    """The inputs of a plan, checked and made before a model is loaded."""

    def __init__(self, settings: Settings, plan: EvalPlan) -> None:
        """Raises `InvalidValueError`: the plan names an unknown cache, or lengths that do not fit the model or the
        files.
        """
        settings.target.require_lossless("the full cache is what all others are compared with")
        self.settings, self.plan = settings, plan
        self.cases = cases_of(plan)
        self.selectors = selectors_of(plan)
        require(
            bool(self.selectors) or "cost" not in plan.tasks,
            "selectors",
            list(plan.caches),
            "must name at least one selector for --task cost: only selectors have a cost",
        )
        chunk, least = settings.retrieval.chunk, least_budget(settings.retrieval.chunk)
        for budget in plan.budgets:
            fits = budget.is_percent or (budget.amount % chunk == 0 and budget.amount >= least)
            require(
                fits,
                "budgets",
                budget.name,
                f"must be a multiple of the chunk, {chunk}, and {least} at least",
            )
        longest = context_length(load_config(settings.target.model, "target"))
        for length in plan.lengths:
            require(length <= longest, "lengths", length, f"must fit the context of {longest} tokens")
        fits = plan.end < longest
        more = plan.end - plan.context
        rule = f"and {more} scored tokens after it, with one more, must fit the context of {longest} tokens"
        require(fits or not plan.reads_files, "context", plan.context, rule)
        if "batch" in plan.tasks:
            check_batches(settings, plan.context, longest)
        tokenizer = load_tokenizer(settings.target.model)
        self.files = held_out_inputs(tokenizer, plan) if plan.reads_files else []
        self.needles = needle_inputs(tokenizer, plan) if "needle" in plan.tasks else []
        self.with_whole = TRIFORCE in plan.caches or not plan.caches

    @property
    def steps(self) -> int:
        """How many times `Watch.begin` is called."""
        read = (len(self.files) if self.scores_files else 0) + len(self.needles)
        costs = (len(self.plan.lengths) + 1) * ("cost" in self.plan.tasks)
        return read + costs + len(KINDS) * ("batch" in self.plan.tasks)

    @property
    def scores_files(self) -> bool:
        return bool(ON_FILES & set(self.plan.tasks))

    def run(self, watch: Watch) -> dict[str, Any]:
        """The figures, with what they depend on."""
        load_before, batches = os.getloadavg()[0], {}
        if "batch" in self.plan.tasks:  # before the engine of the other tasks takes memory
            prompts = [text.tokens[: self.plan.context] for text in self.files]
            batches["batches"] = measure_batches(self.settings, prompts, watch)
            free_memory(self.settings)
        engine = load_local_engine(self.settings, drafting=None if self.with_whole else False)
        runners = runners_of(engine)
        target = self._model(runners[Tier.TARGET].model)
        sparse = self._model(runners[Tier.RETRIEVAL].model) if Tier.RETRIEVAL in runners else target

        def read(text: Input) -> Reading:
            return Reading(target, sparse, text.tokens, self.settings.retrieval.chunk, self.selectors)

        figures: dict[str, Any] = {
            "plan": self.plan.record(),
            "machine": {"cpu": cpu_summary(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
            "versions": {"triforce": __version__, "torch": version("torch"), "transformers": version("transformers")},
            "settings": self.settings.model_dump(mode="json"),
        } | batches
        whole: dict[str, Any] = {}
        for name, inputs in (("files", self.files if self.scores_files else []), ("needles", self.needles)):
            if not inputs:
                continue
            some = inputs[:WHOLE_FILES] if name == "files" else inputs
            ours = Whole(engine, self.settings.speculation.effective, some) if self.with_whole else None
            figures[name] = self._rows(name, measure(inputs, self.cases, read, watch, ours))
            if ours is not None:
                whole[name] = ours.figures()
        if self.scores_files:
            figures["choice"] = choose(figures["files"], [*CUT])
        if whole:
            figures["triforce"] = whole
        if "cost" in self.plan.tasks:
            figures["costs"] = measure_costs(target, self.selectors, self.plan, self.settings, watch)
            chunk = self.settings.retrieval.chunk
            figures["prefills"] = measure_prefills(target, self.selectors, self.plan, chunk, watch)
        return figures | {"published": PUBLISHED, "load_average": [load_before, os.getloadavg()[0]]}

    def _model(self, model: Any) -> Model:
        kernel = kernel_for(self.settings, kv_geometry(model).head_dim)
        return Model(model, kernel, threads_for(self.settings))

    def _rows(self, kind: str, found: Results) -> list[dict[str, Any]]:
        """A row for each case and group, and one over both halves, or over all needle inputs of the greatest length
        only, because a large budget holds the whole of a short input.
        """
        on_files = kind == "files"
        names: tuple[str, ...] = ("half",) if on_files else ("kind", "length", "depth")
        tasks = [task for task in self.plan.tasks if not (on_files and task == "needle")]
        longest = max(self.plan.lengths)
        all_of_them = ("all",) if on_files else ("all", longest, None)
        whole: Results = {}
        for (case, group), counts in found.items():
            if on_files or group[1] == longest:
                whole[case, all_of_them] = whole.get((case, all_of_them), Counts()) + counts
        results = found | whole
        order = {case: number for number, case in enumerate(self.cases)}
        return [
            {"cache": case.cache, "budget": case.budget and case.budget.name}
            | dict(zip(names, group, strict=True))
            | counts.figures(tasks)
            for (case, group), counts in sorted(results.items(), key=lambda item: order[item[0][0]])
        ]
