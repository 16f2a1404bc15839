"""The Markdown page of an evaluation's figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from triforce_tools.evaluation.texts import MANY_KEYS, ONE_KEY
from triforce_tools.tables import decimals, markdown_table, pivot

Row = dict[str, Any]
NAMES = {"full": "full cache", "streaming_llm": "StreamingLLM (lossy)", "heavy_hitter": "H2O (lossy)"}


def report(figures: dict[str, Any]) -> str:
    """All tables that the figures have rows for."""
    return "\n\n".join(_parts(figures)) + "\n"


def _parts(figures: dict[str, Any]) -> Iterator[str]:
    settings, plan = figures["settings"], figures["plan"]
    yield f"{settings['target']['model']}, {settings['dtype']}, chunks of {settings['retrieval']['chunk']} tokens."
    if files := [row for row in _named(figures.get("files", [])) if row["half"] == "all"]:
        where = f"{plan['documents']} held-out files, {plan['stretches']} × {plan['scored']} tokens"
        yield f"**Acceptance at T = 0 / T = 1: {where} after {plan['context']}**"
        yield pivot(files, ["cache"], "budget", _acceptance)
        yield "**By tier and temperature: the target's token among the tier's k likeliest, and rejection's bound**"
        yield _by_temperature([row for row in files if row["cache"] in (settings["retrieval"]["selector"], "draft")])
        if choice := figures["choice"]:
            a, b = (f"{_pair(half)} (± {decimals(half['error'])})" for half in (choice["half_a"], choice["half_b"]))
            yield f"Best selector at {choice['budget']} tokens on half A: {choice['selector']}, {a}. On half B: {b}."
    if needles := _named(figures.get("needles", [])):
        longest = max(plan["lengths"])
        whole = [row for row in needles if row["kind"] == "all" and row["length"] == longest]
        for kind, place, axis in ((MANY_KEYS, " at the start, by length", "length"), (ONE_KEY, ", by depth", "depth")):
            yield f"**Recall, {kind}{place}**"
            yield pivot([row for row in needles if row["kind"] == kind], ["cache", "budget"], axis, _recall)
        yield f"**Recall, needle inputs of {longest} tokens**"
        yield pivot(whole, ["cache"], "budget", _recall)
        yield f"**Acceptance at T = 0 / T = 1: answers to needle inputs of {longest} tokens**"
        yield pivot(whole, ["cache"], "budget", _acceptance)
    for name, row in figures["triforce"].items():
        yield (
            f"TriForce (lossless): {row['same']} of {row['texts']} {name} go on with the full cache's own tokens,"
            f" {row['tokens']} tokens in {row['speculative_rounds']} speculative rounds."
        )
    if batches := figures.get("batches"):
        yield f"**Decoding after {plan['context']} tokens, in {batches[0]['memory'] / 2**20:.0f} MiB of KV**"
        cells = [
            [row["cache"], str(row["batch"]), f"{row['kv_bytes'] / 2**20:.0f}", f"{row['tokens_per_s']:.1f}"]
            for row in _named(batches)
        ]
        yield markdown_table(["cache", "batch", "KV, MiB", "tokens a second"], cells)


def _by_temperature(rows: Sequence[Row]) -> str:
    ranks = [f"hit@{rank}" for rank in rows[0]["hits"]["T0"]] if rows else []
    cells = [
        [row["cache"], str(row["budget"] or ""), name[1:], *map(decimals, hits.values()), decimals(bound)]
        for row in rows
        for (name, hits), bound in zip(row["hits"].items(), row["rejection"].values(), strict=True)
    ]
    return markdown_table(["cache", "budget", "T", *ranks, "rejection"], cells)


def _named(rows: Sequence[Row]) -> list[Row]:
    return [row | {"cache": NAMES.get(row["cache"], row["cache"])} for row in rows]


def _recall(rows: Sequence[Row]) -> str:
    """The recall over all answers of these rows."""
    return decimals(sum(row["recall"] * row["answers"] for row in rows) / sum(row["answers"] for row in rows))


def _acceptance(rows: Sequence[Row]) -> str:
    return _pair(rows[0]["acceptance"])


def _pair(rates: dict[str, float]) -> str:
    return f"{decimals(rates['T0'])} / {decimals(rates['T1'])}"
