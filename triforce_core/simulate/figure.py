"""Pictures of a simulation: a timeline of the passes, and throughput by number of micro-batches."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from triforce_core.messages import Tier
from triforce_core.simulate.bound import bound_tokens_per_s
from triforce_core.simulate.measures import Result
from triforce_core.simulate.model import simulate
from triforce_core.simulate.scenario import Scenario

COLOURS = {Tier.DRAFT: "#4c9f70", Tier.RETRIEVAL: "#3b8ea5", Tier.TARGET: "#5c4d7d"}
MICRO_BATCHES = (1, 2, 3, 4)
VERIFIES_SHOWN = 6


def draw_timeline(axes: Axes, result: Result) -> None:
    """Draw the passes on the first replica's devices, from the window's start over its first few target passes."""
    devices = {name: passes for name, passes in result.passes.items() if name.startswith("0/")}
    start = result.recorder.window.start_s
    verified = [
        each.end_s for passes in devices.values() for each in passes if each.tier is Tier.TARGET and each.end_s > start
    ]
    end = verified[: VERIFIES_SHOWN + 1][-1] if verified else result.recorder.window.end_s
    for row, passes in enumerate(devices.values()):
        for tier, colour in COLOURS.items():
            shown = [each for each in passes if each.tier is tier and each.end_s > start and each.start_s < end]
            bars = [(1e3 * (each.start_s - start), 1e3 * (each.end_s - each.start_s)) for each in shown]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.2)
    axes.set_xlim(0, 1e3 * (end - start))
    axes.set_yticks(range(len(devices)), [name.partition("/")[2] for name in devices])
    axes.set_xlabel("milliseconds")
    axes.set_title("passes of the first replica")


def draw_micro_batches(axes: Axes, scenario: Scenario) -> None:
    """Draw tokens per second by number of micro-batches, with the upper bound."""
    swept = [scenario.model_copy(update={"micro_batches": count}) for count in MICRO_BATCHES]
    axes.plot(MICRO_BATCHES, [bound_tokens_per_s(each) for each in swept], "--", color="grey", label="bound")
    axes.plot(MICRO_BATCHES, [simulate(each).tokens_per_s for each in swept], "o-", color="#5c4d7d", label="simulated")
    axes.set_xticks(MICRO_BATCHES)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("micro-batches (1: sequential)")
    axes.set_ylabel("tokens per second")
    axes.legend()


def draw(scenario: Scenario, result: Result) -> Figure:
    """Both pictures in one figure."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    timeline, micro_batches = figure.subplots(2, 1, height_ratios=(2, 3))
    draw_timeline(timeline, result)
    draw_micro_batches(micro_batches, scenario)
    return figure
