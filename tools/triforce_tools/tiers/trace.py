"""Writes the timeline of a run as a Chrome trace (chrome://tracing, Perfetto) or as a picture."""

from __future__ import annotations

import json
from pathlib import Path

from triforce_core.errors import InvalidValueError
from triforce_core.messages import Tier
from triforce_tools.tiers.arrangement import Run

COLOURS = {Tier.DRAFT: "#2a9d8f", Tier.RETRIEVAL: "#457b9d", Tier.TARGET: "#e76f51"}


def write_trace(run: Run, path: Path) -> None:
    """Write a Chrome trace with one lane per tier. Time 0 is the moment from which all requests were decoding."""
    names = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": int(tier), "args": {"name": tier.name.lower()}}
        for tier in Tier
    ]
    stages = [
        {
            "name": f"{stage.batch} x {stage.tokens / stage.batch:g}",
            "ph": "X",
            "pid": 1,
            "tid": int(stage.tier),
            "ts": 1e6 * (stage.start - run.begin),
            "dur": 1e6 * (stage.stop - stage.start),
            "args": {"sequences": stage.batch, "tokens": stage.tokens},
        }
        for stage in run.stages
        if stage.start >= run.begin
    ]
    try:
        path.write_text(json.dumps({"traceEvents": names + stages, "displayTimeUnit": "ms"}))
    except OSError as error:
        raise InvalidValueError("trace", str(path), f"cannot be written: {error.strerror}") from None


def draw_trace(run: Run, path: Path, *, seconds: float, title: str) -> None:
    """Draw the first `seconds` of the run as bars; the suffix of `path` selects the image format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 2.6), layout="constrained")
    for tier in Tier:
        stages = [s for s in run.within(tier) if s.start < run.begin + seconds]
        bars = [(1e3 * (s.start - run.begin), 1e3 * (s.stop - s.start)) for s in stages]
        axes.broken_barh(bars, (tier - 0.4, 0.8), facecolor=COLOURS[tier], edgecolor="white", linewidth=0.4)
    labels = [f"{tier.name.lower()}\n{run.busy_share(tier):.0%} busy" for tier in Tier]
    axes.set(yticks=[int(tier) for tier in Tier], yticklabels=labels, xlabel="milliseconds", title=title)
    axes.set_xlim(0, 1e3 * seconds)
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path)
    except OSError as error:
        raise InvalidValueError("figure", str(path), f"cannot be written: {error.strerror}") from None
    pyplot.close(figure)
