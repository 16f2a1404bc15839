"""The figures of a pair of weights: how well the target uses a long context, and how often it accepts drafts.

Everything is measured on held-out files, which training never sees, and on fresh recall tasks.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from triforce_core.errors import require
from triforce_core.models.device import DTYPES, torch_device
from triforce_core.models.load import load_model
from triforce_core.models.precision import machine_dtype
from triforce_tools.demo_training.acceptance import RuleMeans, measure_acceptance
from triforce_tools.demo_training.corpus import Corpus, build_corpus
from triforce_tools.demo_training.recall import RecallTasks, recall_probe
from triforce_tools.demo_training.settings import DemoSettings

Tick = Callable[[], None]
_SCORED = 1024  # tokens at the end of each window, scored with little and with much context


@dataclass(frozen=True)
class EvaluationPlan:
    """The extent of an evaluation; figures of different plans are not comparable."""

    context: int = 16384  # longest window, tokens
    documents: int = 20
    acceptance_context: int = 8192
    recall_distances: tuple[int, ...] = (256, 1024, 2048, 4096, 8192, 16384, 30000)
    probes: int = 8  # sequences per distance
    questions: int = 8  # per probe
    distractors: int = 8  # definitions in a probe that are not asked for
    free_outputs: int = 8
    free_tokens: int = 256

    @classmethod
    def of_context(cls, context: int) -> EvaluationPlan:
        """The default plan with windows of `context` tokens."""
        return cls(context=context, acceptance_context=min(context, cls.acceptance_context))


def evaluate(
    weights: Path,
    settings: DemoSettings,
    plan: EvaluationPlan = EvaluationPlan(),
    *,
    device: str = "cpu",
    dtype: str = "auto",
    threads: int | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """The figures of the pair in `weights`, under the keys of the model card's table.

    Raises:
        InvalidValueError: `weights` holds no exported pair, the held-out files are too short for the plan, or
            `device`, `dtype` or `threads` is invalid.
    """
    history = weights / "training.json"
    require(history.is_file(), "weights", str(weights), "has no training.json: must be what `demo export` wrote")
    training = json.loads(history.read_text(encoding="utf-8"))
    where = torch_device(device)
    dtype = machine_dtype(where.type) if dtype == "auto" else dtype
    require(dtype in DTYPES, "dtype", dtype, f"must be auto, {', '.join(DTYPES)}")
    if threads is not None:
        require(threads >= 1, "threads", threads, "must be at least 1")
        torch.set_num_threads(threads)
    corpus = build_corpus(settings.corpus, settings.tokenizer, settings.corpus_dir)
    target = AutoModelForCausalLM.from_pretrained(weights / "target", dtype=DTYPES[dtype]).eval()
    target.to(where)
    windows = held_out_windows(corpus, plan.context, plan.documents)
    distances = [d for d in plan.recall_distances if d <= plan.context]
    steps = 2 * len(windows) + plan.probes * len(distances) + plan.free_outputs
    with Progress(console=console) as bar:
        task = bar.add_task("measuring", total=steps)

        def tick() -> None:
            bar.advance(task)

        tasks = RecallTasks.from_file(settings.tokenizer)
        return {
            "dtype": dtype,
            **loss_figures(target, windows, tick),
            "recall_by_distance": {
                str(distance): recall_accuracy(
                    target, tasks, corpus, plan, distance=distance, seed=settings.seed, tick=tick
                )
                for distance in distances
            },
            "repeated_16gram_share": repeated_share(target, windows[: plan.free_outputs], plan.free_tokens, tick),
            "acceptance": _acceptance(weights, windows, plan, device, dtype, tick),
            "trained_context": training["target"]["trained_context"],
            "tokens_seen": training["target"]["tokens_seen"],
        }


def held_out_windows(corpus: Corpus, context: int, count: int) -> list[Tensor]:
    """The first `context` tokens of the `count` longest held-out files, [context] int64 each.

    Raises:
        InvalidValueError: fewer than `count` files are that long.
    """
    fitting = [document for document in corpus.documents if document.stop - document.start >= context]
    rule = f"must be at most the length of {count} held-out files; only {len(fitting)} are that long"
    require(len(fitting) >= count, "context", context, rule)
    return [torch.from_numpy(corpus.document(document)[:context].astype(np.int64)) for document in fitting[:count]]


@torch.inference_mode()
def loss_figures(model: PreTrainedModel, windows: Sequence[Tensor], tick: Tick = lambda: None) -> dict[str, Any]:
    """Mean loss in nats per token, by position and by length of the context.

    `loss_by_position` compares different text at different positions, so a fall from bucket to bucket is due partly to
    context and partly to the text. `loss_by_context` compares the same tokens, the last `_SCORED` of each window, in
    the whole window and in only its last `2 * _SCORED` tokens.
    """
    sums: dict[str, list[float]] = defaultdict(list)
    contexts: dict[str, list[float]] = defaultdict(list)
    for window in windows:
        losses = _losses(model, window)
        length = len(window)
        start, stop = 0, 512
        while start < length - 1:
            sums[f"{start}-{stop}"].append(float(losses[start:stop].mean()))
            start, stop = stop, 2 * stop
        if length >= 4 * _SCORED:
            contexts[str(length)].append(float(losses[-_SCORED:].mean()))
            contexts[str(2 * _SCORED)].append(float(_losses(model, window[-2 * _SCORED :])[-_SCORED:].mean()))
        tick()
    means = [{key: sum(values) / len(values) for key, values in table.items()} for table in (sums, contexts)]
    return {"loss_by_position": means[0], "loss_by_context": means[1]}


def _losses(model: PreTrainedModel, window: Tensor) -> Tensor:
    """Loss of each token but the first, nats, [length - 1] float32."""
    scores = model(window[None].to(model.device), use_cache=False).logits[0, :-1]
    labels = window[1:].to(model.device)
    pieces = [slice(first, first + 2048) for first in range(0, len(labels), 2048)]
    losses = [F.cross_entropy(scores[piece].float(), labels[piece], reduction="none") for piece in pieces]
    return torch.cat(losses).cpu()


@torch.inference_mode()
def recall_accuracy(
    model: PreTrainedModel,
    tasks: RecallTasks,
    corpus: Corpus,
    plan: EvaluationPlan,
    *,
    distance: int,
    seed: int,
    tick: Tick = lambda: None,
) -> float:
    """Share of questions `distance` tokens after their definitions for which the model predicts every token of the
    value (greedy, teacher-forced).
    """
    right = asked = 0
    for number in range(plan.probes):
        rng = np.random.default_rng((seed, 7, distance, number))
        start = int(rng.integers(len(corpus.held_out) - distance - 1))
        filler = corpus.held_out[start : start + distance]
        probe = recall_probe(rng, tasks, filler, distance, questions=plan.questions, distractors=plan.distractors)
        ids = torch.from_numpy(probe.ids.astype(np.int64))
        first = int(probe.is_answer.argmax())
        scores = model(ids[None].to(model.device), use_cache=False, logits_to_keep=len(ids) - first + 1).logits[0]
        hits = (scores[:-1].argmax(-1).cpu() == ids[first:]).numpy()
        for answer in answer_runs(probe.is_answer[first:]):
            right += bool(hits[answer].all())
            asked += 1
        tick()
    return right / asked


def answer_runs(is_answer: np.ndarray[Any, np.dtype[np.bool_]]) -> list[slice]:
    """The runs of consecutive answer tokens, one per question."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_answer, [False]]).astype(np.int8)))
    return [slice(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


@torch.inference_mode()
def repeated_share(
    model: PreTrainedModel, windows: Sequence[Tensor], num_tokens: int, tick: Tick = lambda: None
) -> float:
    """Share of the 16-grams in greedy output that repeat an earlier one of the same output."""
    repeated = total = 0
    for window in windows:
        prompt = window[None, :1024].to(model.device)
        output = model.generate(prompt, max_new_tokens=num_tokens, do_sample=False)  # type: ignore[operator]
        tokens = output[0, prompt.shape[1] :].tolist()
        grams = [tuple(tokens[i : i + 16]) for i in range(len(tokens) - 15)]
        repeated += len(grams) - len(set(grams))
        total += len(grams)
        tick()
    return repeated / max(1, total)


def compare_rules(weights: Path, settings: DemoSettings, *, documents: int, context: int, dtype: str) -> dict[str, Any]:
    """The acceptance that shared noise and classical rejection give on held-out files, by tier, budget, temperature."""
    dtype = machine_dtype("cpu") if dtype == "auto" else dtype
    require(dtype in DTYPES, "dtype", dtype, f"must be auto, {', '.join(DTYPES)}")
    corpus = build_corpus(settings.corpus, settings.tokenizer, settings.corpus_dir)
    texts = [window.tolist() for window in held_out_windows(corpus, context, documents)]
    target, drafter = (load_model(str(weights / role), role, dtype, "cpu") for role in ("target", "drafter"))
    return {"dtype": dtype, **measure_acceptance(target, drafter, texts, mean=RuleMeans)}


def _acceptance(
    weights: Path, windows: Sequence[Tensor], plan: EvaluationPlan, device: str, dtype: str, tick: Tick
) -> Any:
    target = load_model(str(weights / "target"), "target", dtype, device)
    drafter = load_model(str(weights / "drafter"), "drafter", dtype, device)
    documents = [window[: plan.acceptance_context].tolist() for window in windows]
    return measure_acceptance(target, drafter, documents, on_document=tick)
