"""`triforce eval`: what a cache must score by construction, what it measures on, and what it writes and refuses."""

from __future__ import annotations

import gc
import json
import sysconfig
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import validate
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GPTNeoXConfig
from triforce_tools.evaluation.choice import choose
from triforce_tools.evaluation.costs import measure_costs
from triforce_tools.evaluation.walk import measure

from tests.command_line import Refusals, run
from tests.random_models import plain_logits, random_pair, random_tokens
from triforce_core.attention import KERNELS
from triforce_core.config import Settings, load_settings
from triforce_core.demo import weights_dir
from triforce_core.errors import InvalidValueError
from triforce_core.models.files import load_tokenizer
from triforce_core.models.load import ATTENTION
from triforce_tools.bench.prompts import held_out_path
from triforce_tools.evaluation import batches
from triforce_tools.evaluation.caches import CACHES, CUT, SINKS, Case, cases_of, selector_named
from triforce_tools.evaluation.measures import Counts, Scored
from triforce_tools.evaluation.plan import Budget, EvalPlan
from triforce_tools.evaluation.reading import SEQUENCE, WRITTEN, Model, Reading
from triforce_tools.evaluation.report import by_budget, report
from triforce_tools.evaluation.texts import MANY_KEYS, ONE_KEY, Input, Stretch, held_out_inputs, needle_inputs

CONTEXT, SCORED = 200, 24
TOKENS = random_tokens(CONTEXT + SCORED + 1, seed=3)
PAIR = random_pair()
MODEL = Model(PAIR.ours, KERNELS["cpu_flash"], None)
TEXT = Input("random", TOKENS, (Stretch(CONTEXT, CONTEXT + SCORED, seen=CONTEXT),), ("A",))


class Silent:
    """Hears how far an evaluation is."""

    def begin(self, name: str) -> None:
        pass


def read(text: Input) -> Reading:
    return Reading(MODEL, MODEL, text.tokens, 8, [*CUT])


def counts(case: Case, text: Input = TEXT) -> Counts:
    return measure([text], [case], read, Silent(), None)[case, text.group]


# -- what a cache must score -------------------------------------------------------------------------------------------

ALL = ("perplexity", "agreement", "acceptance")


def test_the_full_cache_agrees_with_itself() -> None:
    full = counts(Case("full", None)).figures(ALL)
    assert full["agreement"] == full["acceptance"]["T0"] == full["acceptance"]["T1"] == 1.0
    assert full["tokens"] == SCORED
    truth = torch.tensor(TOKENS[CONTEXT + 1 :])
    logits = plain_logits(PAIR.theirs, TOKENS[:-1])[CONTEXT:]
    assert full["perplexity"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, truth).exp()), rel=1e-4)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("seen", [CONTEXT, CONTEXT + 1])
def test_a_budget_that_covers_the_text_agrees_exactly(cache: str, seen: int) -> None:
    text = Input("random", TOKENS, (Stretch(CONTEXT, CONTEXT + SCORED, seen),), ("A",))
    results = measure([text], [Case("full", None), Case(cache, Budget(256))], read, Silent(), None)
    full, covering = results.values()
    assert covering.same_greedy == covering.same_sampled == SCORED
    assert covering.loss == pytest.approx(full.loss, rel=1e-5)


@pytest.mark.parametrize("cache", CACHES)
def test_a_small_budget_forgets(cache: str) -> None:
    assert counts(Case(cache, Budget(32))).same_greedy < SCORED


def test_streaming_llm_sees_sinks_and_window_and_nothing_else() -> None:
    budget = 32
    # The third stretch begins 64 tokens after the first, so the window is filled anew; before, it only grows.
    starts = (CONTEXT - 64, CONTEXT - 48, CONTEXT)
    text = Input("random", TOKENS, tuple(Stretch(start, start + SCORED, seen=start) for start in starts), ("A",))
    logits_of = CACHES["streaming_llm"](read(text), text, budget)
    for stretch, filled in zip(text.stretches, (starts[0], starts[0], starts[2]), strict=True):
        held = TOKENS[:SINKS] + TOKENS[filled - (budget - SINKS) : stretch.stop]
        expected = plain_logits(PAIR.theirs, held)[-SCORED:]
        torch.testing.assert_close(logits_of(stretch), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CUT)
def test_selectors_see_one_token_more_than_the_snapshot_of_an_answer_holds(name: str) -> None:
    """The last token of a question chooses, and is then forwarded over what it chose."""
    reading = read(TEXT)
    stretch = Stretch(CONTEXT, CONTEXT + SCORED, seen=CONTEXT + 1)
    snapshot = reading.cut(stretch, 256, selector_named(name))
    assert (snapshot.position, snapshot.num_tokens) == (CONTEXT, CONTEXT)
    start = reading.full.held[SEQUENCE].ranges[0][0]
    for layer, keys in enumerate(reading.full.keys):
        assert torch.equal(snapshot.keys[layer], keys[:, start : start + CONTEXT])


@pytest.mark.parametrize("name", CUT)
def test_one_reading_serves_all_selectors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each selector chooses what it would choose from a text that is read for it alone. This also holds at a second
    cut, and with other passes.
    """
    together, alone = (Reading(MODEL, MODEL, TOKENS, 8, names) for names in ([*CUT], [name]))
    for start in (150, CONTEXT):
        stretch = Stretch(start, start + 10, seen=start)
        for reading, pass_tokens in ((together, 48), (alone, 2048)):
            monkeypatch.setattr("triforce_tools.evaluation.reading.PREFILL_CHUNK", pass_tokens)
            reading.read(start)
        for other in CUT:
            together.cut(stretch, 64, selector_named(other))
        cut, expected = (reading.cut(stretch, 64, selector_named(name)) for reading in (together, alone))
        torch.testing.assert_close((cut.keys, cut.values), (expected.keys, expected.values))
        together.logits(stretch)
        alone.logits(stretch)


def test_written_is_what_greedy_decoding_writes() -> None:
    expected = list(TOKENS[: CONTEXT + 1])
    for _ in range(5):
        expected.append(int(plain_logits(PAIR.theirs, tuple(expected))[-1].argmax()))
    assert read(TEXT).written(CONTEXT, 5) == expected[CONTEXT + 1 :]


# -- what is counted ---------------------------------------------------------------------------------------------------


def certain(tokens: list[int]) -> torch.Tensor:
    """Logits by which these tokens are drawn, at any temperature in use."""
    return 1000 * torch.nn.functional.one_hot(torch.tensor(tokens), 8).float()


@pytest.mark.parametrize(("written", "same", "recall"), [([1, 2, 3], 3, 1.0), ([1, 2, 4], 2, 0.0), ([0, 0, 0], 0, 0.0)])
def test_an_answer_counts_only_when_all_of_it_is_right(written: list[int], same: int, recall: float) -> None:
    truth = [1, 2, 3]
    exact, own = (Scored.at(10, certain(tokens)) for tokens in (truth, written))
    figures = Counts.of(exact, own, truth).figures(("needle", "agreement", "acceptance"))
    assert figures["recall"] == recall
    assert figures["agreement"] == figures["acceptance"]["T1"] == same / 3


def test_draws_at_temperature_1_share_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 50, generator=generator)
    near = logits + 0.1 * torch.randn(64, 50, generator=generator)
    same = Counts.of(Scored.at(0, logits), Scored.at(0, near), [0] * 64)
    other = Counts.of(Scored.at(0, logits), Scored.at(1000, near), [0] * 64)
    assert same.same_sampled > 0.85 * 64
    assert other.same_sampled < 0.2 * 64, "noise of other positions"
    assert same.same_greedy == other.same_greedy, "greedy draws have no noise"


def test_counts_add_up() -> None:
    total = Counts(2, 1.0, 1, 0.5, 1, 1) + Counts(6, 3.0, 5, 4.5, 3, 1)
    figures = total.figures(("needle", *ALL))
    assert figures == {
        "tokens": 8,
        "answers": 4,
        "recall": 0.5,
        "perplexity": pytest.approx(2.718281828**0.5),
        "agreement": 0.75,
        "acceptance": {"T0": 0.75, "T1": 0.625},
    }


def row(cache: str, half: str, rate: float, budget: str = "1024") -> dict[str, Any]:
    return {"cache": cache, "budget": budget, "half": half, "tokens": 900, "acceptance": {"T0": rate, "T1": rate - 0.1}}


def test_the_selector_is_chosen_on_one_half_and_reported_on_the_other() -> None:
    rows = [
        *(row("near", half, rate) for half, rate in (("A", 0.8), ("B", 0.95), ("all", 0.9))),
        *(row("best", half, rate) for half, rate in (("A", 0.9), ("B", 0.7), ("all", 0.8))),
        row("lossy", "A", 0.99),
        row("near", "A", 0.99, budget="4096"),
    ]
    chosen = choose(rows, ["near", "best"])
    assert chosen is not None
    assert (chosen["selector"], chosen["half_a"]["T0"], chosen["half_b"]["T0"]) == ("best", 0.9, 0.7)
    assert chosen["half_a"]["error"] == pytest.approx(0.01)
    assert chosen["half_b"]["error"] == pytest.approx((0.7 * 0.3 / 900) ** 0.5)
    assert choose(rows, ["absent"]) is None


# -- what is measured --------------------------------------------------------------------------------------------------

TOKENIZER = load_tokenizer("demo")
SMALL = EvalPlan(lengths=(1024, 2048), probes=1, depths=(0.0, 0.5))


def test_a_needle_is_asked_for_at_the_end_and_stands_at_its_depth() -> None:
    decode = Tokenizer.from_file(str(weights_dir("target") / "tokenizer.json")).decode
    inputs = needle_inputs(TOKENIZER, SMALL)
    assert len(inputs) == 2 * 3
    for text in inputs:
        kind, length, depth = text.group
        assert 0.8 * length < len(text.tokens) <= length
        assert len(text.stretches) == (1 if kind == ONE_KEY else SMALL.keys)
        for stretch in text.stretches:
            value = decode(stretch.predicted(text.tokens)).strip()
            assert value
            assert stretch.seen == stretch.start + 1
            prompt = list(text.tokens[: stretch.seen])
            before = next(n for n in range(len(prompt)) if value in decode(prompt[: n + 1]))
            if kind == ONE_KEY and value.isdigit():
                assert abs(before - depth * length) < 0.1 * length
            assert before < stretch.start - 64, "not copied from the question"
    assert {text.group[0] for text in inputs} == {ONE_KEY, MANY_KEYS}


def test_the_same_seed_gives_the_same_needles() -> None:
    assert needle_inputs(TOKENIZER, SMALL) == needle_inputs(TOKENIZER, SMALL)
    assert needle_inputs(TOKENIZER, SMALL) != needle_inputs(TOKENIZER, EvalPlan(lengths=(1024, 2048), seed=1))


def test_files_alternate_between_the_halves() -> None:
    inputs = held_out_inputs(TOKENIZER, EvalPlan(documents=4, context=128))
    assert [text.group for text in inputs] == [("A",), ("B",), ("A",), ("B",)]
    assert len({text.name for text in inputs}) == 4
    for text in inputs:
        assert [(s.start, s.stop, s.seen) for s in text.stretches] == [(128, 192, 128), (192, 256, 192)]
        assert [len(stretch.predicted(text.tokens)) for stretch in text.stretches] == [64, 64]


def test_a_file_whose_code_has_moved_is_found_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert held_out_path("datetime.py") == tmp_path / "datetime.py"
    (tmp_path / "_pydatetime.py").touch()  # since Python 3.12
    assert held_out_path("datetime.py") == tmp_path / "_pydatetime.py"


def test_a_file_that_is_too_short_for_the_context_is_named() -> None:
    plan = EvalPlan(context=40_000, scored=64, stretches=2)
    message = r"context: 40000 must be at most \d+: inspect.py has \d+ tokens, and 129 are needed"
    with pytest.raises(InvalidValueError, match=message):
        held_out_inputs(load_tokenizer(str(weights_dir("target"))), plan)


def test_a_budget_may_be_a_share_of_the_context() -> None:
    assert Budget.parse("1024").tokens(context=8192, chunk=8) == 1024
    assert Budget.parse("5%").tokens(context=8192, chunk=8) == 408
    assert Budget.parse("5%").tokens(context=100, chunk=8) == 32, "the least"
    assert Budget.parse("5%").tokens(context=100, chunk=1) == 8 > SINKS, "what StreamingLLM keeps is not all of it"
    assert [Budget.parse(text).name for text in ("512", "20%")] == ["512", "20%"]


def test_the_full_cache_is_always_measured() -> None:
    plan = EvalPlan(caches=("mean_key",), budgets=(Budget(256), Budget(5, True)))
    assert [(case.cache, case.budget and case.budget.name) for case in cases_of(plan)] == [
        ("full", None),
        ("mean_key", "256"),
        ("mean_key", "5%"),
    ]


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def _threads() -> Iterator[None]:
    """Runners set the number of threads. This restores it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


RATES = {
    "type": "object",
    "required": ["T0", "T1"],
    "additionalProperties": {"type": "number", "minimum": 0, "maximum": 1},
}
ROW = {
    "required": ["cache", "budget", "tokens", "acceptance"],
    "properties": {
        "cache": {"enum": ["full", *CACHES]},
        "budget": {"enum": [None, "64", "20%"]},
        "tokens": {"type": "integer", "minimum": 1},
        "acceptance": RATES,
        "recall": {"type": "number", "minimum": 0, "maximum": 1},
        "perplexity": {"type": "number", "minimum": 1},
    },
}
SCHEMA = {
    "type": "object",
    "required": [
        "plan",
        "machine",
        "versions",
        "settings",
        "files",
        "needles",
        "triforce",
        "costs",
        "prefills",
        "published",
    ],
    "properties": {
        "files": {"items": {"required": ["half", "perplexity", "agreement"], **ROW}},
        "needles": {"items": {"required": ["kind", "length", "depth", "recall"], **ROW}},
        "costs": {
            "items": {
                "required": ["context", "selector", "first_cut_ms", "refresh_ms", "verify_ms", "share_of_decoding"],
                "additionalProperties": {"exclusiveMinimum": 0},
            }
        },
    },
}
TINY = ("--documents", "2", "--context", "256", "--lengths", "512", "--budgets", "64,20%", "--probes", "1")


@pytest.mark.ci
@pytest.mark.usefixtures("_threads")
def test_the_command_measures_and_writes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "figures"
    some = ("--selectors", "triforce,mean_key,h2o,streaming_llm,heavy_hitter")
    arguments = ("eval", *TINY, *some, "--dtype", "float32", "--threads", "1", "--force", "--out", str(out), "--json")
    assert run(monkeypatch, *arguments, "--task", "needle,perplexity,agreement,acceptance,cost") == 0
    captured = capsys.readouterr()
    figures = json.loads(captured.out)
    validate(figures, SCHEMA)
    assert json.loads((out / "eval.json").read_text()) == figures
    assert (out / "eval.md").read_text() == report(figures)
    assert "<svg" in (out / "eval.svg").read_text()
    assert "━" in captured.err, "a bar"

    def of(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
        (found,) = [row for row in rows if row | wanted == row]
        return found

    assert of(figures["files"], cache="full", half="all")["acceptance"] == {"T0": 1, "T1": 1}
    halves = [of(figures["files"], cache="mean_key", budget="64", half=half) for half in ("A", "B", "all")]
    assert [row["tokens"] for row in halves] == [128, 128, 256]
    assert 0 < halves[2]["agreement"] < 1
    many = {"kind": MANY_KEYS, "length": 512}
    assert of(figures["needles"], cache="full", **many)["recall"] == 1
    assert of(figures["needles"], cache="full", kind="all")["length"] == 512
    streaming = of(figures["needles"], cache="streaming_llm", budget="64", **many)
    assert (streaming["answers"], streaming["recall"]) == (8, 0), "its window holds none of the keys"
    for whole in figures["triforce"].values():
        assert whole["same_text"] == 1
        assert whole["speculative_rounds"] > 0
        assert whole["recall"] == whole["recall_full"]
        assert whole["tokens"] >= WRITTEN * whole["texts"]
    assert figures["triforce"]["needles"]["texts"] == 1 + 4, "many keys, and one key at each depth"
    assert [row["selector"] for row in figures["costs"]] == ["mean_key", "h2o"]
    assert [row["selector"] for row in figures["prefills"]] == ["mean_key", "h2o"]


@pytest.mark.usefixtures("_threads")
def test_texts_are_as_long_as_the_kv_pool_has_room_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "triforce.yaml"
    config.write_text("target: {kv_pool_tokens: 512}")
    some = ("--task", "needle", "--selectors", "triforce", "--config", str(config))
    assert run(monkeypatch, "eval", *TINY, *some, "--dtype", "float32", "--threads", "1", "--force", "--json") == 0
    whole = json.loads(capsys.readouterr().out)["triforce"]["needles"]
    assert whole["same_text"] == 1
    assert 0 < whole["tokens"] < WRITTEN * whole["texts"]


@pytest.mark.ci
@pytest.mark.usefixtures("_threads")
def test_batches_fit_into_the_memory_of_four_full_caches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, tokens in (("OUTPUT", 48), ("TIMED", 12)):
        monkeypatch.setattr(batches, name, tokens)
    arguments = ("eval", *TINY[:4], "--dtype", "float32", "--threads", "1", "--force", "--budget", "64")
    assert run(monkeypatch, *arguments, "--task", "batch", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["batches"]
    by_cache = {kind: [row["batch"] for row in rows if row["cache"] == kind] for kind in batches.KINDS}
    assert by_cache["full"] == [1, 2, 4]
    assert by_cache["heavy_hitter"][-1] > 8, "a quarter of the tokens, and the queries since the last eviction"
    assert by_cache["triforce"][0] == 1
    assert by_cache["triforce"][-1] < 4, "the drafting tiers have KV too"
    assert all(row["kv_bytes"] <= row["memory"] and row["tokens_per_s"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ("target: {offload: host}", ["target.offload", "'host'", "must be none"]),
        ("target: {audit: 0.5}", ["target.audit", "0.5", "must be 0"]),
        ("speculation: {tiers: target}", ["speculation.tiers", "'target'", "must draft"]),
        ("speculation: {lookaheads: [0, 0]}", ["speculation.lookaheads", "(0, 0)", "must draft"]),
        ("dtype: float32", ["context", "15900", "must be at most"]),
    ],
)
def test_batches_are_refused_by_name(refusals: Refusals, tmp_path: Path, settings: str, named: list[str]) -> None:
    path = tmp_path / "triforce.yaml"
    path.write_text(settings)
    context = "15900" if "context" in named else "256"
    refusals.check(named, "eval", "--task", "batch", "--force", "--context", context, "--config", str(path))


def test_batches_double_up_to_the_largest() -> None:
    assert [batches.up_to(most) for most in (0, 1, 4, 11)] == [[], [1], [1, 2, 4], [1, 2, 4, 8, 11]]


def test_an_engine_is_gone_before_the_next_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[weakref.ref[Knot]] = []

    class Knot:  # like an engine, whose parts refer to each other
        def __init__(self, settings: Settings) -> None:
            assert all(each() is None for each in loaded)
            self.itself = self
            loaded.append(weakref.ref(self))

    monkeypatch.setattr(batches, "load_local_engine", Knot)
    gc.disable()
    try:
        for kind in batches.KINDS:
            batches.engine_for(kind, load_settings(), 1, 64)
    finally:
        gc.enable()
    assert len(loaded) == 3


def test_a_table_without_budgets_has_as_many_columns_as_cells() -> None:
    lines = by_budget([{"cache": "full", "budget": None}], lambda row: ".5").splitlines()
    assert lines == ["| cache | all |", "| --- | --- |", "| full cache | .5 |"]


def test_costs_of_a_model_whose_configuration_names_no_kv_heads() -> None:
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = GPTNeoXConfig(vocab_size=256, max_position_embeddings=8192, **size)
    model = Model(AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval(), MODEL.kernel, None)
    settings = load_settings(dtype="float32", retrieval={"budget": 64})
    plan = EvalPlan(tasks=("cost",), lengths=(512,))
    [row] = measure_costs(model, ["mean_key"], plan, settings, Silent())
    assert row["first_cut_ms"] > 0


@pytest.mark.usefixtures("_threads")
def test_only_what_is_asked_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("eval", *TINY, "--dtype", "float32", "--threads", "1", "--task", "perplexity")
    assert run(monkeypatch, *arguments, "--selectors", "mean_key", "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert not {"needles", "triforce", "costs"} & figures.keys()
    assert {row["cache"] for row in figures["files"]} == {"full", "mean_key"}
    assert all(row.keys() == {"cache", "budget", "half", "tokens", "perplexity"} for row in figures["files"])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--task", "speed"], ["task", "'speed'", "must be one of needle"]),
        (["--task", ""], ["task", "must name some of"]),
        (["--task", "needle,needle"], ["task", "each value once"]),
        (["--selectors", "best"], ["selectors", "'best'", "must be one of full, triforce, mean_key"]),
        (["--budgets", "many"], ["budgets", "'many'", "must be tokens"]),
        (["--budgets", "0"], ["budgets", "'0'", "must be tokens"]),
        (["--budgets", "200%"], ["budgets", "'200%'", "at most 100%"]),
        (["--budgets", "100"], ["budgets", "'100'", "multiple of the chunk, 8"]),
        (["--budgets", "24"], ["budgets", "'24'", "32 at least"]),
        (["--lengths", "1k"], ["lengths", "'1k'", "whole numbers"]),
        (["--lengths", "100"], ["lengths", "100", "at least 512"]),
        (["--lengths", "32768"], ["lengths", "32768", "must fit the context of 16384"]),
        (["--documents", "1"], ["documents", "1", "at least 2"]),
        (["--documents", "99"], ["documents", "99", "at most 18"]),
        (["--context", "16384"], ["context", "16384", "must fit the context of 16384"]),
        (["--context", "16300"], ["context: 16300 and 128 scored tokens after it", "the context of 16384"]),
        (["--chunk", "1", "--budgets", "4"], ["budgets", "'4'", "8 at least"]),
        (["--selectors", "full", "--task", "cost"], ["selectors", "at least one selector for --task cost"]),
        (["--probes", "0"], ["probes", "0", "at least 1"]),
        (["--out", "nowhere/figures"], ["out", "nowhere", "directory that does not exist"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, refusals: Refusals, tmp_path: Path, arguments: list[str], named: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    refusals.check(named, "eval", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_forgets_is_refused(refusals: Refusals, tmp_path: Path) -> None:
    settings = tmp_path / "triforce.yaml"
    settings.write_text("target: {eviction: heavy_hitter}\n")
    refusals.check(["target.eviction", "'heavy_hitter'", "must be none"], "eval", "--config", str(settings))
