"""`triforce bench sweep`: what it varies, how it compares modes, where it goes on after a stop, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import Refusals, run
from triforce_core.config import Settings, load_settings
from triforce_core.engine.sequence import Stats
from triforce_core.errors import InvalidValueError
from triforce_core.messages import Drafting, Tally
from triforce_core.plans import PLAIN, Plan
from triforce_tools.bench.axes import (
    AXES,
    Axes,
    Mode,
    Point,
    by_engine,
    coordinates,
    modes_with,
    name_of,
    parse_axes,
    parse_plans,
    points_of,
    settings_at,
)
from triforce_tools.bench.pairs import Measured, figures_of, geometric_mean, identical_share, summary_of
from triforce_tools.bench.sweep import WARM_UP_TOKENS, Workload, num_runs, sweep
from triforce_tools.bench.sweep_file import SweepFile
from triforce_tools.plots import draw_speedups, lines_of, save_figure

BASE = Point(context=4096, budget=1024, chunk=8, dtype="float32", temperature=0.0)
HEADER = {"sweep": {"output": 8}, "settings": {"retrieval": {"budget": 1024, "chunk": 8}}}


# -- axes and modes ----------------------------------------------------------------------------------------------------


def test_axes_are_read_in_their_order() -> None:
    axes = parse_axes(["temperature=0, .8", "context=64", "dtype"])
    assert axes == {"temperature": (0.0, 0.8), "context": (64,), "dtype": ("float32", "bfloat16")}
    assert list(axes) == ["temperature", "context", "dtype"]


def test_every_axis_has_defaults_that_it_accepts() -> None:
    for name in AXES:
        assert len(parse_axes([name])[name]) > 1


def test_points_are_the_product_with_the_last_axis_fastest() -> None:
    axes = parse_axes(["context=1,2", "temperature=0,1"])
    points = points_of(axes, BASE)
    assert [(point.context, point.temperature) for point in points] == [(1, 0.0), (1, 1.0), (2, 0.0), (2, 1.0)]
    assert {(point.budget, point.chunk, point.dtype, point.concurrency) for point in points} == {
        (1024, 8, "float32", None)
    }
    assert name_of(points[1], axes) == "context 1, temperature 1"


def test_each_engine_measures_its_points_together() -> None:
    points = points_of(parse_axes(["context=1,2", "budget=64,128", "concurrency=1,2"]), BASE)
    groups = by_engine(points)
    assert [{point.budget for point in group} for group in groups] == [{64}, {128}]
    assert sorted(map(repr, points)) == sorted(repr(point) for group in groups for point in group)
    assert [(point.context, point.concurrency) for point in groups[0]] == [(1, 1), (1, 2), (2, 1), (2, 2)]


def test_an_engine_s_settings_are_checked() -> None:
    [[point]] = by_engine(points_of(parse_axes(["budget=60"]), BASE))
    with pytest.raises(InvalidValueError, match="60 must be a multiple of chunk 8"):
        settings_at(load_settings(), point)
    settings = settings_at(load_settings(speculation={"lookaheads": [5, 2]}), BASE)
    assert (settings.dtype, settings.speculation.lookaheads) == ("float32", (5, 2)), "all else stays"


def test_plans_are_measured_beside_plain_decoding_and_the_controller() -> None:
    assert modes_with(parse_plans("8,3/0, 3:lookup")) == [
        Mode("plain", PLAIN),
        Mode("auto", None),
        Mode("8,3", Plan(8, 3, Drafting.MODEL)),
        Mode("0,3:lookup", Plan(0, 3, Drafting.LOOKUP)),
    ]
    assert [mode.name for mode in modes_with(parse_plans(None))] == ["plain", "auto"]


# -- statistics --------------------------------------------------------------------------------------------------------


def one(ms: float, tokens: Sequence[int] = (1, 2, 3), stats: Stats | None = None) -> Measured:
    return Measured(ms, 0.1, [[*tokens]], stats or Stats())


def test_a_speed_up_is_the_median_of_the_ratios_of_pairs() -> None:
    """The machine is half as fast in the second turn: medians of times would hide it, ratios of pairs do not."""
    runs = {
        "plain": [one(10), one(20), one(10)],
        "auto": [one(5), one(10), one(4)],
        "8,3": [one(4), one(8), one(20)],
    }
    figures = figures_of(runs)
    auto = figures["modes"]["auto"]
    assert (auto["speedup"], auto["speedup_min"], auto["speedup_max"]) == (2.0, 2.0, 2.5)
    assert auto["ms_per_token"] == 5
    assert auto["tokens_per_s"] == 200
    assert figures["modes"]["8,3"]["speedup"] == 2.5
    assert figures["modes"]["plain"]["spread"] == 1.0
    assert "spread" not in auto
    assert (figures["best_plan"], figures["auto_over_best"]) == ("8,3", 0.8)


def test_plain_decoding_may_be_the_best_fixed_plan() -> None:
    runs = {"plain": [one(10)], "auto": [one(10.5)], "8,3": [one(20)]}
    figures = figures_of(runs)
    assert figures["best_plan"] == "plain"
    assert figures["auto_over_best"] == pytest.approx(10 / 10.5)
    del runs["8,3"]
    assert figures_of(runs)["auto_over_best"] is None, "with no plan there is nothing to be compared with"


def test_counts_are_those_of_all_runs() -> None:
    level = (Tally(rounds=2, proposed=8, accepted=6, rejected=1), Tally(), Tally())
    speculative = Stats(decoded=8, plans={"model": 2}, tallies=list(level), direct=level[0])
    plain = Stats(decoded=4, plans={"plain": 4}, tallies=[Tally(rounds=4), Tally(), Tally()], direct=Tally(rounds=4))
    auto = figures_of({"plain": [one(1), one(1)], "auto": [one(1, stats=speculative), one(1, stats=plain)]})["modes"][
        "auto"
    ]
    assert auto["tokens_per_round"] == 2
    assert auto["speculative_share"] == pytest.approx(1 / 3)
    assert auto["acceptance"] == {"retrieval": None, "draft": pytest.approx(6 / 7)}


def test_outputs_are_compared_as_far_as_both_go() -> None:
    reference = Measured(1, 0, [[1, 2, 3], [4, 5]], Stats())
    same = Measured(1, 0, [[1, 2], [4, 5, 6]], Stats())
    half = Measured(1, 0, [[1, 2, 4], [4, 5]], Stats())
    assert identical_share([same], reference) == 1
    assert identical_share([same, half], reference) == 0.75
    figures = figures_of({"plain": [reference, reference], "auto": [same, half]})["modes"]
    assert (figures["plain"]["identical"], figures["auto"]["identical"]) == (True, False)


def test_the_summary_is_the_geometric_mean_of_what_was_measured() -> None:
    points = [
        figures_of({"plain": [one(8)], "auto": [one(1)], "4,2": [one(2)]}),
        figures_of({"plain": [one(2)], "auto": [one(1)]}),
    ]
    summary = summary_of(points)
    assert summary["speedup"] == {"auto": pytest.approx(4), "4,2": pytest.approx(4)}
    assert summary["auto_over_best"] == pytest.approx(2), "only the first point has another plan"
    assert geometric_mean([2, 8]) == pytest.approx(4)


# -- the loop ----------------------------------------------------------------------------------------------------------


class Scripted:
    """A bench without an engine, that writes down what it is asked."""

    def __init__(self) -> None:
        self.opened: list[int] = []
        self.runs: list[tuple[Point, str, int]] = []
        self.told: list[str] = []
        self.about: dict[str, Any] = {"threads": 1}

    @contextmanager
    def open(self, settings: Settings, points: Sequence[Point]) -> Iterator[Scripted]:
        self.opened.append(settings.retrieval.budget)
        yield self

    def run(self, point: Point, mode: Mode, output: int) -> Measured:
        self.runs.append((point, mode.name, output))
        return Measured(2.0 if mode.name == "plain" else 1.0, 0.1 * point.context, [[1]], Stats())

    def report(self, text: str) -> None:
        self.told.append(text)

    def begin(self, name: str) -> None:
        pass


def test_modes_take_turns_and_every_second_turn_is_reversed() -> None:
    bench, kept = Scripted(), dict[Point, dict[str, Any]]()
    axes = parse_axes(["budget=64,128", "context=10,20"])
    points, load = points_of(axes, BASE), Workload(100, 3, 0, 0, parse_plans("8,3"))
    sweep(points, axes, load_settings(), load, open_bench=bench.open, keep=kept.__setitem__, watch=bench)
    assert bench.opened == [64, 128]
    assert list(kept) == points
    timed = [mode for point, mode, output in bench.runs if output == 100 and point == points[0]]
    assert timed == ["plain", "auto", "8,3", "8,3", "auto", "plain", "plain", "auto", "8,3"]
    warm_ups = [(point.context, mode) for point, mode, output in bench.runs if output == WARM_UP_TOKENS]
    assert warm_ups == 2 * [(20, "plain"), (20, "auto"), (20, "8,3")], "at each engine's largest point"
    assert len(bench.runs) == num_runs(points, load) == 36 + 6
    assert len(bench.told) == 4
    assert bench.told[0] == "budget 64, context 10: plain 2.00 ms a token, auto 2.00×, 8,3 2.00×"
    assert kept[points[0]]["modes"]["auto"]["speedup"] == 2
    assert kept[points[0]]["engine"] == {"threads": 1}


# -- the file ----------------------------------------------------------------------------------------------------------


def test_a_file_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    other = replace(BASE, temperature=0.8)
    file = SweepFile(path, HEADER)
    file.keep(BASE, {"modes": {}, "seconds": 1})
    file.keep(other, {"modes": {}, "seconds": 2})
    again = SweepFile(path, HEADER)
    assert [again.figures_at(point) for point in (BASE, other)] == file.points
    assert again.figures_at(replace(BASE, context=1)) is None


def test_a_stop_while_a_point_is_written_leaves_the_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sweep.jsonl"
    file = SweepFile(path, HEADER)
    file.keep(BASE, {"modes": {}})
    whole = path.read_text()

    def stopped(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", stopped)
        with pytest.raises(KeyboardInterrupt):
            file.keep(replace(BASE, context=1), {"modes": {}})
    assert path.read_text() == whole
    assert len(SweepFile(path, HEADER).points) == 1


def test_a_sweep_under_other_conditions_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    SweepFile(path, HEADER).keep(BASE, {"modes": {}})
    before = path.read_text()
    changed = {"sweep": {"output": 9}, "settings": {"retrieval": {"budget": 1024, "chunk": 4}}}
    with pytest.raises(InvalidValueError, match=r"sweep.output 8, now 9; settings.retrieval.chunk 8, now 4\)") as error:
        SweepFile(path, changed)
    assert str(path)[:60] in str(error.value)
    assert path.read_text() == before, "a refused file stays as it is"


@pytest.mark.parametrize(
    "content",
    [
        "no sweep\n",
        "no sweep",
        '{"a": 1}\n',
        "[1]\n",
        "\n",
        "\xff",
        '{"sweep": {"output": 9',
        '{"sweep": {"output": 8}}',
    ],
)
def test_a_file_of_another_kind_is_refused_and_kept(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(InvalidValueError, match="holds no sweep"):
        SweepFile(path, HEADER)
    assert path.read_text(encoding="latin-1") == content


# -- the figure --------------------------------------------------------------------------------------------------------


def figures_at(point: Point) -> dict[str, Any]:
    return {"point": coordinates(point)} | figures_of({"plain": [one(4)], "auto": [one(2)], "8,3": [one(1)]})


@pytest.mark.parametrize(
    ("texts", "panels", "lines"),
    [
        (["context=1,2"], 2, []),
        (["context=1,2", "temperature=0,.8"], 2, ["temperature 0", "temperature 0.8"]),
        (["context=1,2", "chunk=4,8", "temperature=0,.8"], 4, ["chunk 4", "chunk 8"]),
    ],
)
def test_a_figure_has_a_line_for_each_value(tmp_path: Path, texts: list[str], panels: int, lines: list[str]) -> None:
    axes = parse_axes(texts)
    points = [figures_at(point) for point in points_of(axes, BASE)]
    figure = draw_speedups(points, axes)
    assert len(figure.axes) == panels
    for panel in figure.axes:
        legend = panel.get_legend()
        assert [text.get_text() for text in legend.get_texts()] == lines if legend is not None else not lines
        assert panel.get_ylim()[1] > 4, "all of the bars can be seen"
    path = tmp_path / "sweep.svg"
    save_figure(figure, path)
    assert "</svg>" in path.read_text()


def test_a_line_goes_through_its_points() -> None:
    axes: Axes = parse_axes(["context=1,2", "temperature=0,.8"])
    points = [figures_at(point) for point in points_of(axes, BASE)]
    lines = dict(lines_of(points, axes))
    assert list(lines) == ["temperature 0", "temperature 0.8"]
    for label, line in lines.items():
        assert [f"temperature {point['point']['temperature']:g}" for point in line] == [label] * 2


# -- the command -------------------------------------------------------------------------------------------------------


TINY = ("--output", "12", "--repeats", "2", "--dtype", "float32", "--threads", "1", "--force")


@pytest.mark.usefixtures("own_threads")
def test_a_sweep_measures_draws_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = ("bench", "sweep", *TINY, "--plans", "4,2/0,2:lookup", "--axis", "temperature=0,.8")
    assert run(monkeypatch, *tiny, "--axis", "context=64", "--json") == 0
    first = json.loads(capsys.readouterr().out)
    assert [figures["point"]["temperature"] for figures in first["points"]] == [0, 0.8]
    for figures in first["points"]:
        assert list(figures["modes"]) == ["plain", "auto", "4,2", "0,2:lookup"]
        assert all(mode["identical"] for mode in figures["modes"].values())
        assert all(mode["ms_per_token"] > 0 for mode in figures["modes"].values())
        assert figures["modes"]["plain"]["speculative_share"] == 0
        assert figures["modes"]["4,2"]["speculative_share"] > 0.5
        assert figures["modes"]["4,2"]["tokens_per_round"] > 1
        assert all(figures["modes"]["4,2"]["step_ms"][tier] > 0 for tier in ("draft", "retrieval", "target"))
        assert figures["modes"]["plain"]["step_ms"]["draft"] is None
        assert figures["modes"]["plain"]["prefill_s"] > 0
        assert figures["best_plan"] in figures["modes"]
    assert set(first["summary"]["speedup"]) == {"auto", "4,2", "0,2:lookup"}
    lines = [json.loads(line) for line in Path("sweep.jsonl").read_text().splitlines()]
    assert lines[0] == {name: first[name] for name in ("sweep", "machine", "versions", "settings")}
    assert lines[1:] == first["points"]

    assert run(monkeypatch, *tiny, "--axis", "context=32,64", "--figure", "sweep.svg") == 0
    captured = capsys.readouterr()
    table = captured.out.splitlines()
    assert sum(line.startswith("| 0 ") for line in table) == sum(line.startswith("| 0.8 ") for line in table) == 8
    assert "geometric mean of the speed-ups over 4 points" in captured.out
    assert [line.partition(":")[0] for line in captured.err.splitlines() if "ms a token" in line] == [
        "temperature 0, context 32",
        "temperature 0.8, context 32",
    ], "the others are there"
    assert Path("sweep.svg").stat().st_size > 1000
    again = [json.loads(line) for line in Path("sweep.jsonl").read_text().splitlines()]
    assert (again[:3], len(again)) == (lines, 5)


@pytest.mark.usefixtures("own_threads")
def test_settings_may_be_axes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = str(tmp_path / "sweep.jsonl")
    axes = ("--axis", "budget=32,64", "--context", "80")
    assert run(monkeypatch, "bench", "sweep", *TINY, *axes, "--out", out, "--json") == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [(figures["point"]["budget"], list(figures["modes"])) for figures in points] == [
        (32, ["plain", "auto"]),
        (64, ["plain", "auto"]),
    ]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--axis", "contxt"], ["axis", "contxt", "must be one of context, budget"]),
        (["--axis", "context", "--axis", "context=4"], ["axis", "context", "once"]),
        (["--axis", "context=4,4"], ["axis context", "4,4", "each value once"]),
        (["--axis", "context=0"], ["axis context", "'0'", "at least 1"]),
        (["--axis", "context="], ["axis context", "''", "whole number"]),
        (["--axis", "context=20000"], ["context", "20000", "must fit the context of 16384"]),
        (["--axis", "temperature=inf"], ["axis temperature", "inf", "between 0 and 100"]),
        (["--plans", "8"], ["plans", "'8'", "retrieval,draft"]),
        (["--plans", "8,x"], ["plans", "'8,x'", "retrieval,draft"]),
        (["--plans", "8,-1"], ["plans", "'8,-1'", "retrieval,draft"]),
        (["--plans", "99,1"], ["plans", "99,1", "at most 64"]),
        (["--plans", "0,0"], ["plans", "0,0", "is plain decoding"]),
        (["--axis", "dtype=auto"], ["axis dtype", "auto", "must be one of float32"]),
        (["--axis", "budget=100"], ["retrieval", "100", "multiple of chunk 8"]),
        (["--plans", "8,3:me"], ["plans", "me", "must be one of model"]),
        (["--plans", "8,3/8,3"], ["plans", "8,3/8,3", "each plan once"]),
        (["--plans", "8,3", "--tiers", "target"], ["plans", "retrieval+model 8,3", "--tiers leaves out"]),
        (["--plans", "0,3", "--tiers", "retrieval,target"], ["plans", "model 0,3", "--tiers leaves out"]),
        (["--output", "1"], ["output", "1", "at least 2"]),
        (["--seed", str(2**70)], ["--seed", str(2**63 - 1)]),
        (["--seed", str(-(2**63) - 1)], ["--seed", str(-(2**63))]),
        (["--seed", str(2**63 - 1), "--output", "1"], ["output", "at least 2"]),
        (["--seed", str(-(2**63)), "--output", "1"], ["output", "at least 2"]),
        (["--out", "nowhere/sweep.jsonl"], ["out", "nowhere", "directory that does not exist"]),
        (["--figure", "sweep.pdf"], ["figure", "sweep.pdf", ".svg, .png"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, refusals: Refusals, tmp_path: Path, arguments: list[str], named: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    refusals.check(named, "bench", "sweep", "--force", *arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("own_threads")
@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("deterministic: true", ["deterministic: True", "must be false", "controller"]),
        ("speculation: {controller: off}", ["speculation.controller: False", "must be true"]),
        ("speculation: {tiers: target}", ["speculation: ", "'tiers': 'target'", "must let a tier draft"]),
        ("speculation: {lookaheads: [0, 0]}", ["speculation: ", "'lookaheads': (0, 0)", "must let a tier draft"]),
    ],
)
def test_nothing_else_is_measured_as_the_controller(
    monkeypatch: pytest.MonkeyPatch, refusals: Refusals, tmp_path: Path, given: str, named: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("settings.yaml").write_text(given)
    tiny = ("--context", "64", "--output", "12", "--dtype", "float32", "--threads", "1", "--force")
    refusals.check(named, "bench", "sweep", *tiny, "--config", "settings.yaml")
    assert not Path("sweep.jsonl").exists()
