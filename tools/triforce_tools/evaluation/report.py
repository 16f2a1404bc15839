"""The Markdown page of an evaluation's figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from triforce_tools.evaluation.texts import MANY_KEYS, ONE_KEY
from triforce_tools.tables import decimals, markdown_table

Row = dict[str, Any]
LABELS = {
    "full": "full cache",
    "draft": "draft tier",
    "triforce": "TriForce",
    "streaming_llm": "StreamingLLM (lossy)",
    "heavy_hitter": "H2O (lossy)",
}


def report(figures: dict[str, Any]) -> str:
    """All tables that the figures have rows for."""
    return "\n\n".join(_parts(figures)) + "\n"


def _parts(figures: dict[str, Any]) -> Iterator[str]:
    settings, plan = figures["settings"], figures["plan"]
    yield f"{settings['target']['model']}, {settings['dtype']}, chunks of {settings['retrieval']['chunk']} tokens."
    if files := [row for row in figures.get("files", []) if row["half"] == "all"]:
        yield (
            f"**Acceptance at T = 0 / T = 1: {plan['documents']} held-out files, {plan['stretches']} × {plan['scored']}"
            f" tokens after {plan['context']}**"
        )
        yield pivot(files, ["cache"], "budget", _acceptance)
        yield "**By tier and temperature: the target's token among the tier's k likeliest, and rejection's bound**"
        yield by_temperature([row for row in files if row["cache"] in (settings["retrieval"]["selector"], "draft")])
        if choice := figures["choice"]:
            a, b = (f"{_pair(half)} (± {decimals(half['error'])})" for half in (choice["half_a"], choice["half_b"]))
            yield (
                f"Best selector at {choice['budget']} tokens on half A: `{choice['selector']}`, {a}. On half B: {b}."
            )
    if needles := figures.get("needles"):
        longest = max(plan["lengths"])
        whole = [row for row in needles if row["kind"] == "all" and row["length"] == longest]
        for kind, place, axis in ((MANY_KEYS, " at the start, by length", "length"), (ONE_KEY, ", by depth", "depth")):
            yield f"**Recall, {kind}{place}**"
            yield pivot([row for row in needles if row["kind"] == kind], ["cache", "budget"], axis, _recall)
        yield f"**Recall, needle inputs of {longest} tokens**"
        yield pivot(whole, ["cache"], "budget", _recall)
        yield f"**Acceptance at T = 0 / T = 1: answers to needle inputs of {longest} tokens**"
        yield pivot(whole, ["cache"], "budget", _acceptance)
    for name, row in figures.get("triforce", {}).items():
        yield (
            f"TriForce (lossless) on {row['texts']} {name}, {row['tokens']} tokens in {row['speculative_rounds']}"
            f" speculative rounds: {row['same_text']:.1%} of the texts are the full cache's own. The text's own"
            f" continuation: TriForce {decimals(row['recall'])}, full cache {decimals(row['recall_full'])}."
        )
    if batches := figures.get("batches"):
        yield f"**Decoding after {plan['context']} tokens, in {batches[0]['memory'] / 2**20:.0f} MiB of KV**"
        cells = [
            [label(row["cache"]), str(row["batch"]), f"{row['kv_bytes'] / 2**20:.0f}", f"{row['tokens_per_s']:.1f}"]
            for row in batches
        ]
        yield markdown_table(("cache", "batch", "KV, MiB", "tokens a second"), cells)


def pivot(rows: Sequence[Row], names: Sequence[str], axis: str, shown: Callable[[Sequence[Row]], str]) -> str:
    """A line for each value of the fields `names`, and a column for each value of the axis. A row without a value on the
    axis, such as the full cache's, which has no budget, is in all columns.
    """
    values = sorted({row[axis] for row in rows if row[axis] is not None}) or ["all"]
    lines: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        lines.setdefault(tuple(row[name] for name in names), []).append(row)
    cells = [
        [*map(label, place), *(shown([row for row in line if row[axis] in (value, None)]) for value in values)]
        for place, line in lines.items()
    ]
    return markdown_table([*names, *map(str, values)], cells)


def by_temperature(rows: Sequence[Row]) -> str:
    """A line for each cache, budget and temperature."""
    cells = [
        [label(row["cache"]), label(row["budget"]), name[1:], *map(decimals, hits.values()), decimals(bound)]
        for row in rows
        for (name, hits), bound in zip(row["hits"].items(), row["rejection"].values(), strict=True)
    ]
    ranks = [f"hit@{rank}" for rank in rows[0]["hits"]["T0"]] if rows else []
    return markdown_table(["cache", "budget", "T", *ranks, "rejection"], cells)


def label(value: str | int | None) -> str:
    """A cache or a budget as the tables name it."""
    return LABELS.get(value, f"`{value}`") if isinstance(value, str) else str(value or "")


def _recall(rows: Sequence[Row]) -> str:
    """The recall over all answers of these rows."""
    return decimals(sum(row["recall"] * row["answers"] for row in rows) / sum(row["answers"] for row in rows))


def _acceptance(rows: Sequence[Row]) -> str:
    return _pair(rows[0]["acceptance"])


def _pair(rates: dict[str, float]) -> str:
    return f"{decimals(rates['T0'])} / {decimals(rates['T1'])}"
