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
from tokenizers import Tokenizer
from torch.nn.functional import one_hot

from tests.command_line import Refusals, run
from tests.random_models import plain_logits, random_pair, random_tokens
from triforce_core.attention import KERNELS
from triforce_core.config import Settings, load_settings
from triforce_core.demo import weights_dir
from triforce_core.errors import InvalidValueError
from triforce_core.kv.full import FullKV
from triforce_core.kv.selectors import SELECTORS
from triforce_core.messages import GREEDY, SamplingParams, Tier
from triforce_core.models.files import load_tokenizer
from triforce_core.models.load import kv_geometry
from triforce_core.models.runner import ModelRunner
from triforce_core.sampling.draw import Draw, draw_tokens
from triforce_tools.bench.prompts import held_out_path
from triforce_tools.evaluation import batches
from triforce_tools.evaluation.caches import CACHES, CUT, DRAFT, FULL, SEQUENCE, SINKS, SPARSE, Case, Reading, cases_of
from triforce_tools.evaluation.evaluate import add_counts, choose
from triforce_tools.evaluation.measures import RANKS, SEEDS, TEMPERATURES, Counts, Exact
from triforce_tools.evaluation.plan import EvalPlan
from triforce_tools.evaluation.report import report
from triforce_tools.evaluation.texts import MANY_KEYS, ONE_KEY, Input, Stretch, held_out_inputs, needle_inputs
from triforce_tools.tables import decimals, pivot

CONTEXT, SCORED = 200, 24
TOKENS = random_tokens(CONTEXT + SCORED + 1, seed=3)
PAIR = random_pair()
SETTINGS = load_settings(dtype="float32", draft={"window": 28})
RUNNER = ModelRunner(PAIR.ours, FullKV(kv_geometry(PAIR.ours), 1, KERNELS["cpu_flash"]))
ALONE = (("half", "A"),)


def text_of(*starts: int, seen: int = 0) -> Input:
    """The random text with stretches of `SCORED` tokens; selectors see `seen` tokens more than what lies before one."""
    stretches = tuple(Stretch(start, start + SCORED, start + seen) for start in starts)
    return Input("random", TOKENS, stretches, (ALONE,))


def read(selectors: tuple[str, ...] = (*CUT,)) -> Reading:
    return Reading(dict.fromkeys(Tier, RUNNER), SETTINGS, TOKENS, selectors)


def counts(case: Case, seen: int = 0) -> Counts:
    sums = {Case(FULL): {ALONE: Counts()}, case: {ALONE: Counts()}}
    add_counts(sums, text_of(CONTEXT, seen=seen), read())
    return sums[case][ALONE]


# -- what a cache must score -------------------------------------------------------------------------------------------


def test_the_full_cache_agrees_with_itself_and_with_one_plain_pass() -> None:
    figures = counts(Case(FULL)).figures()
    assert figures["tokens"] == SCORED
    assert set(figures["acceptance"].values()) == {1.0}
    assert list(figures["rejection"].values()) == pytest.approx([1.0] * len(TEMPERATURES))
    logits = read().logits(Stretch(CONTEXT, CONTEXT + SCORED, CONTEXT))
    torch.testing.assert_close(logits, plain_logits(PAIR.theirs, TOKENS[:-1])[CONTEXT:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", SPARSE)
@pytest.mark.parametrize("seen", [0, 1])
def test_a_budget_that_covers_the_text_agrees_exactly(cache: str, seen: int) -> None:
    figures = counts(Case(cache, 256), seen).figures()
    assert set(figures["acceptance"].values()) == {1.0}


@pytest.mark.parametrize("case", [*(Case(name, 32) for name in SPARSE), Case(DRAFT)])
def test_a_small_budget_forgets(case: Case) -> None:
    assert counts(case).figures()["acceptance"]["T0"] < 1


@pytest.mark.parametrize("kept", ["streaming", "heavy_hitter"])
def test_the_draft_tier_has_the_cache_of_its_settings(kept: str) -> None:
    settings = load_settings(dtype="float32", draft={"window": 252, "cache": kept})
    text, reading = text_of(CONTEXT), Reading({Tier.TARGET: RUNNER, Tier.DRAFT: RUNNER}, settings, TOKENS, ())
    logits = CACHES[DRAFT](reading, text, 0)(text.stretches[0])
    torch.testing.assert_close(logits, plain_logits(PAIR.theirs, TOKENS[:-1])[CONTEXT:], rtol=1e-4, atol=1e-4)


def test_streaming_llm_sees_sinks_and_window_and_nothing_else() -> None:
    budget = 32
    # The third stretch begins 64 tokens after the first, so the window is filled anew; before, it only grows.
    starts = (CONTEXT - 64, CONTEXT - 48, CONTEXT)
    text = text_of(*starts)
    logits_of = CACHES["streaming_llm"](read(), text, budget)
    for stretch, filled in zip(text.stretches, (starts[0], starts[0], starts[2]), strict=True):
        held = TOKENS[:SINKS] + TOKENS[filled - (budget - SINKS) : stretch.stop]
        expected = plain_logits(PAIR.theirs, held)[-SCORED:]
        torch.testing.assert_close(logits_of(stretch), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CUT)
def test_selectors_see_one_token_more_than_the_snapshot_of_an_answer_holds(name: str) -> None:
    """The last token of a question chooses, and is then forwarded over what it chose."""
    reading = read()
    snapshot = reading.cut(Stretch(CONTEXT, CONTEXT + SCORED, seen=CONTEXT + 1), 256, SELECTORS[name]())
    assert (snapshot.position, snapshot.num_tokens) == (CONTEXT, CONTEXT)
    start = reading.full.held[SEQUENCE].ranges[0][0]
    for layer, keys in enumerate(reading.full.keys):
        assert torch.equal(snapshot.keys[layer], keys[:, start : start + CONTEXT])


@pytest.mark.parametrize("name", CUT)
def test_one_reading_serves_all_selectors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each selector chooses what it would choose from a text that is read for it alone. This also holds at a second
    cut, and with other passes.
    """
    together, alone = read(), read((name,))
    for start in (150, CONTEXT):
        stretch = Stretch(start, start + 10, seen=start)
        for reading, pass_tokens in ((together, 48), (alone, 2048)):
            monkeypatch.setattr("triforce_tools.evaluation.caches.PREFILL_CHUNK", pass_tokens)
            reading.read(start)
        for other in CUT:
            together.cut(stretch, 64, SELECTORS[other]())
        cut, expected = (reading.cut(stretch, 64, SELECTORS[name]()) for reading in (together, alone))
        torch.testing.assert_close((cut.keys, cut.values), (expected.keys, expected.values))
        together.logits(stretch)
        alone.logits(stretch)


# -- what is counted ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("written", "same", "right"), [([1, 2, 3], 3, 1), ([1, 2, 4], 2, 0), ([0, 0, 0], 0, 0)])
def test_an_answer_counts_only_when_all_of_it_is_right(written: list[int], same: int, right: int) -> None:
    truth = [1, 2, 3]
    # Logits by which these tokens are drawn, at any temperature in use.
    exact, own = (1000 * one_hot(torch.tensor(tokens), 8).float() for tokens in (truth, written))
    figures = Counts.of(Exact(10, exact), own, truth).figures()
    assert figures["recall"] == right
    assert figures["acceptance"] == figures["rejection"] == {f"T{t:g}": same / 3 for t in TEMPERATURES}


def test_figures_are_those_of_the_draws() -> None:
    """Acceptance is how often both draw the same token; hits count where the full cache's token stands among a cache's
    perturbed logits, and rejection's bound is Σ min(p, q).
    """
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(64, 50, generator=generator)
    near = exact + torch.randn(64, 50, generator=generator)
    figures = Counts.of(Exact(7, exact), near, [0] * 64).figures()
    for temperature in TEMPERATURES:
        name, sampling = f"T{temperature:g}", SamplingParams(temperature=temperature)
        draws = [[Draw(sampling, seed, 8 + row) for row in range(64)] for seed in SEEDS]
        pairs = [zip(draw_tokens(exact, each), draw_tokens(near, each), strict=True) for each in draws]
        same = sum(a == b for each in pairs for a, b in each) / (64 * len(SEEDS))
        assert figures["acceptance"][name] == figures["hits"][name]["1"] == same
        assert 0.2 < same < 0.9
        assert sorted(figures["hits"][name].values()) == list(figures["hits"][name].values())
        if temperature:
            p, q = ((each / temperature).softmax(-1) for each in (exact, near))
            assert figures["rejection"][name] == pytest.approx(float(torch.minimum(p, q).sum() / 64), rel=1e-5)
    order = near.argsort(descending=True)
    for k in RANKS:
        among = (order[:, :k] == exact.argmax(-1, keepdim=True)).any(-1)
        assert figures["hits"]["T0"][str(k)] == float(among.float().mean())


def test_of_equal_logits_the_lowest_id_is_drawn() -> None:
    level = torch.zeros(1, 4)
    for token, hits in ((0, [1, 1, 1]), (1, [0, 1, 1]), (2, [0, 0, 1])):
        exact = Exact(0, 1000 * one_hot(torch.tensor([token]), 4).float())
        assert [Counts.of(exact, level, [0]).figures()["hits"]["T0"][k] for k in ("1", "2", "4")] == hits
    assert draw_tokens(level, [Draw(GREEDY, 0, 1)]) == [0]


def test_counts_add_up() -> None:
    full = torch.ones(len(TEMPERATURES), len(RANKS) + 1, dtype=torch.float64)
    figures = (Counts(2, 1, 1, full) + Counts(6, 3, 1, 5 * full)).figures()
    assert (figures["tokens"], figures["answers"], figures["recall"]) == (8, 4, 0.5)
    assert figures["acceptance"] == figures["rejection"] == {f"T{t:g}": 0.75 for t in TEMPERATURES}


def row(cache: str, half: str, rate: float, budget: int = 1024) -> dict[str, Any]:
    return {"cache": cache, "budget": budget, "half": half, "tokens": 900, "acceptance": {"T0": rate, "T1": rate - 0.1}}


def test_the_selector_is_chosen_on_one_half_and_reported_on_the_other() -> None:
    rows = [
        *(row("near", half, rate) for half, rate in (("A", 0.8), ("B", 0.95), ("all", 0.9))),
        *(row("best", half, rate) for half, rate in (("A", 0.9), ("B", 0.7), ("all", 0.8))),
        row("lossy", "A", 0.99),
        row("near", "A", 0.99, budget=4096),
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
        kind, length, depth = dict(text.groups[0]).values()
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
        assert text.groups[1] == (("kind", "all"), ("length", length), ("depth", None))
    assert {dict(text.groups[0])["kind"] for text in inputs} == {ONE_KEY, MANY_KEYS}


def test_the_same_seed_gives_the_same_needles() -> None:
    assert needle_inputs(TOKENIZER, SMALL) == needle_inputs(TOKENIZER, SMALL)
    assert needle_inputs(TOKENIZER, SMALL) != needle_inputs(TOKENIZER, EvalPlan(lengths=(1024, 2048), seed=1))


def test_files_alternate_between_the_halves() -> None:
    inputs = held_out_inputs(TOKENIZER, EvalPlan(documents=4, context=128))
    assert [text.groups for text in inputs] == 2 * [((("half", half),), (("half", "all"),)) for half in "AB"]
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


def test_the_full_cache_is_always_measured() -> None:
    plan = EvalPlan(caches=("mean_key",), budgets=(256, 512))
    assert cases_of(plan, SETTINGS) == [Case(FULL), Case("mean_key", 256), Case("mean_key", 512)]
    everything = [case.cache for case in cases_of(EvalPlan(budgets=(256,)), SETTINGS)]
    assert everything == [*CACHES]
    without_drafter = cases_of(EvalPlan(budgets=(256,)), load_settings(draft={"model": "ngram"}))
    assert [case.cache for case in without_drafter] == [name for name in everything if name != DRAFT]


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def _threads() -> Iterator[None]:
    """Runners set the number of threads. This restores it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


FORCED = ("--dtype", "float32", "--threads", "1", "--force", "--json")
TINY = ("--documents", "2", "--context", "256", "--lengths", "512", "--budgets", "64,128", "--probes", "1", *FORCED)


@pytest.mark.ci
@pytest.mark.usefixtures("_threads")
def test_the_command_measures_and_writes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "figures"
    some = ("--caches", "triforce,draft,mean_key,snapkv,h2o,streaming_llm,heavy_hitter")
    assert run(monkeypatch, "eval", *TINY, *some, "--out", str(out)) == 0
    captured = capsys.readouterr()
    figures = json.loads(captured.out)
    for row in figures["files"] + figures["needles"]:
        assert row["cache"] in CACHES
        assert row["budget"] in ((None,) if row["cache"] in (FULL, DRAFT) else (64, 128))
        assert row["tokens"] >= row["answers"] >= 1
        assert 0 <= row["recall"] <= 1
        for name in ("T0", "T0.4", "T0.8", "T1"):
            shares = [row["rejection"][name], *(row["hits"][name][k] for k in ("1", "2", "4", "8"))]
            assert all(0 <= share < 1 + 1e-9 for share in shares)
            assert row["acceptance"][name] == shares[1]
    assert figures.keys() == {*("plan", "machine", "versions", "settings", "files", "needles", "triforce", "choice")}
    assert json.loads((out / "eval.json").read_text()) == figures
    assert (out / "eval.md").read_text() == report(figures)
    assert "<svg" in (out / "eval.svg").read_text()
    assert "━" in captured.err, "a bar"

    def of(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
        (found,) = [row for row in rows if row | wanted == row]
        return found

    assert set(of(figures["files"], cache="full", half="all")["acceptance"].values()) == {1}
    halves = [of(figures["files"], cache="mean_key", budget=64, half=half) for half in ("A", "B", "all")]
    assert [row["tokens"] for row in halves] == [128, 128, 256]
    assert 0 < halves[2]["acceptance"]["T0"] < 1
    draft = of(figures["files"], cache="draft", half="all")
    assert 0 < draft["acceptance"]["T1"] < draft["rejection"]["T1"] < draft["hits"]["T1"]["8"]
    many = {"kind": MANY_KEYS, "length": 512}
    assert of(figures["needles"], cache="full", **many)["recall"] == 1
    assert of(figures["needles"], cache="full", kind="all")["length"] == 512
    streaming = of(figures["needles"], cache="streaming_llm", budget=64, **many)
    assert (streaming["answers"], streaming["recall"]) == (8, 0), "its window holds none of the keys"
    for whole in figures["triforce"].values():
        assert whole["same"] == whole["texts"]
        assert whole["speculative_rounds"] > 0
        assert whole["tokens"] >= 32 * whole["texts"]
    assert figures["triforce"]["needles"]["texts"] == 1 + 4, "many keys, and one key at each depth"
    tables = report(figures)
    assert "| draft  |        | 1   |" in tables
    assert "5 of 5 needles go on with the full cache's own tokens" in tables


@pytest.mark.usefixtures("_threads")
def test_texts_are_as_long_as_the_kv_pool_has_room_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "triforce.yaml"
    config.write_text("target: {kv_pool_tokens: 512}")
    some = ("--task", "needle", "--caches", "triforce", "--config", str(config))
    assert run(monkeypatch, "eval", *TINY, *some) == 0
    figures = json.loads(capsys.readouterr().out)
    assert not {"files", "choice", "batches"} & figures.keys(), "only what is asked is measured"
    whole = figures["triforce"]["needles"]
    assert whole["same"] == whole["texts"]
    assert 0 < whole["tokens"] < 32 * whole["texts"]


@pytest.mark.slow
@pytest.mark.usefixtures("_threads")
def test_batches_fit_into_the_memory_of_four_full_caches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, tokens in (("OUTPUT", 48), ("TIMED", 12)):
        monkeypatch.setattr(batches, name, tokens)
    assert run(monkeypatch, "eval", *TINY, "--budget", "64", "--task", "batch") == 0
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
        ("speculation: {tiers: target}", ["speculation", "(0, 0)", "must draft"]),
        ("speculation: {lookaheads: [0, 0]}", ["speculation", "(0, 0)", "must draft"]),
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


def test_a_row_without_a_value_on_the_axis_is_in_all_columns() -> None:
    rows = [{"cache": "full", "budget": None, "rate": 1.0}, {"cache": "h2o", "budget": 64, "rate": 0.9996}]
    rows.append(rows[1] | {"budget": 128, "rate": 0.25})
    table = pivot(rows, ["cache"], "budget", lambda cell: decimals(cell[0]["rate"])).splitlines()
    assert [line.replace(" ", "") for line in table[2:]] == ["|full|1.000|1.000|", "|h2o|.999+|.250|"]
    alone = pivot(rows[:1], ["cache"], "budget", lambda cell: ".5").splitlines()
    assert [line.replace(" ", "") for line in alone[::2]] == ["|cache|all|", "|full|.5|"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--task", "cost"], ["task", "'cost'", "must be one of needle, acceptance, batch"]),
        (["--task", ""], ["task", "must name one at least"]),
        (["--task", "needle,needle"], ["task", "each value once"]),
        (["--caches", "best"], ["caches", "'best'", "must be one of full, mean_key"]),
        (["--caches", "draft", "--drafter", "ngram"], ["caches", "'draft'", "needs a draft.model"]),
        (["--budgets", "many"], ["budgets", "'many'", "must be whole numbers of tokens"]),
        (["--budgets", "0"], ["budgets", "0", "32 at least"]),
        (["--budgets", "100"], ["budgets", "100", "multiple of the chunk, 8"]),
        (["--budgets", "24"], ["budgets", "24", "32 at least"]),
        (["--lengths", "1k"], ["lengths", "'1k'", "whole numbers"]),
        (["--lengths", "100"], ["lengths", "100", "at least 512"]),
        (["--lengths", "32768"], ["lengths", "32768", "must fit the context of 16384"]),
        (["--documents", "1"], ["documents", "1", "at least 2"]),
        (["--documents", "99"], ["documents", "99", "at most 18"]),
        (["--context", "16384"], ["context", "16384", "must fit the context of 16384"]),
        (["--context", "16300"], ["context: 16300 and 128 scored tokens after it", "the context of 16384"]),
        (["--chunk", "1", "--budgets", "4"], ["budgets", "4", "8 at least"]),
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
