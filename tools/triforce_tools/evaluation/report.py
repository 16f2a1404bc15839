"""The Markdown page of an evaluation's figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from triforce_tools.evaluation.texts import MANY_KEYS, ONE_KEY

Row = dict[str, Any]
LABELS = {
    "full": "full cache",
    "triforce": "TriForce",
    "streaming_llm": "StreamingLLM (lossy)",
    "heavy_hitter": "H2O (lossy)",
}


def report(figures: dict[str, Any]) -> str:
    """All tables that the figures have rows for."""
    return "\n".join(_lines(figures)).rstrip() + "\n"


def _lines(figures: dict[str, Any]) -> Iterator[str]:
    settings, plan = figures["settings"], figures["plan"]
    files, needles = figures.get("files", []), figures.get("needles", [])
    yield f"{settings['target']['model']}, {settings['dtype']}, chunks of {settings['retrieval']['chunk']} tokens.\n"
    where = f"{plan['documents']} held-out files, {plan['stretches']} × {plan['scored']} tokens after {plan['context']}"
    everything = [row for row in files if row["half"] == "all"]
    if everything and "acceptance" in everything[0]:
        yield from _section(f"Acceptance at T = 0 / T = 1: {where}", by_budget(everything, _acceptance))
    if everything and "agreement" in everything[0]:
        yield from _section(f"Agreement with the full cache: {where}", by_budget(everything, _share("agreement")))
    if everything and "perplexity" in everything[0]:
        yield from _section(f"Perplexity: {where}", by_budget(everything, lambda row: f"{row['perplexity']:.2f}"))
    if choice := figures.get("choice"):
        yield _choice(choice) + "\n"
    if needles:
        many = [row for row in needles if row["kind"] == MANY_KEYS]
        one = [row for row in needles if row["kind"] == ONE_KEY]
        yield from _section(f"Recall, {MANY_KEYS} at the start, by length", spread(many, "length"))
        yield from _section(f"Recall, {ONE_KEY}, by depth", spread(one, "depth"))
        whole = [row for row in needles if row["kind"] == "all"]
        longest = whole[0]["length"]
        yield from _section(f"Recall, needle inputs of {longest} tokens", by_budget(whole, _share("recall")))
        if "acceptance" in whole[0]:
            title = f"Acceptance at T = 0 / T = 1: answers to needle inputs of {longest} tokens"
            yield from _section(title, by_budget(whole, _acceptance))
    for name, row in figures.get("triforce", {}).items():
        yield (
            f"TriForce (lossless) on {row['texts']} {name}, {row['tokens']} tokens in {row['speculative_rounds']}"
            f" speculative rounds: {row['same_text']:.1%} of the texts are the full cache's own."
        )
        if name == "needles":
            yield f"Recall there: TriForce {_decimals(row['recall'])}, full cache {_decimals(row['recall_full'])}."
        yield ""
    if costs := figures.get("costs"):
        header = ("context", "selector", "first cut, ms", "refresh, ms", "verify, ms", "refresh / verify", "at most")
        rows = [
            [
                str(row["context"]),
                row["selector"],
                *(f"{row[name]:.1f}" for name in ("first_cut_ms", "refresh_ms", "verify_ms")),
                f"{row['refresh_over_verify']:.2f}",
                f"{row['share_of_decoding']:.1%}",
            ]
            for row in costs
        ]
        yield from _section("Costs", table(header, rows))
    if prefills := figures.get("prefills"):
        context, first = prefills[0]["context"], prefills[0]["selector"]
        cells = [[row["selector"], f"{row['prefill_ms']:.0f}", f"{row['over_first']:.2f}"] for row in prefills]
        columns = ("selector", f"prefill of {context} tokens, ms", f"times that of {first}")
        yield from _section("Prefill", table(columns, cells))
    if batches := figures.get("batches"):
        cells = [
            [label(row["cache"]), str(row["batch"]), f"{row['kv_bytes'] / 2**20:.0f}", f"{row['tokens_per_s']:.1f}"]
            for row in batches
        ]
        title = f"Decoding after {plan['context']} tokens, in {batches[0]['memory'] / 2**20:.0f} MiB of KV"
        yield from _section(title, table(("cache", "batch", "KV, MiB", "tokens a second"), cells))
    if files or needles:
        published = figures["published"]
        cells = [
            [row["cache"], _decimals(row["pg19_acceptance"]), _decimals(row["needle"])] for row in published["rows"]
        ]
        columns = ("cache", "acceptance, PG-19", "needle recall, 4K budget")
        yield from _section(f"Published ({published['source']})", table(columns, cells))


def _choice(choice: Row) -> str:
    a, b = (f"{_pair(half)} (± {_decimals(half['error'])})" for half in (choice["half_a"], choice["half_b"]))
    return f"Best selector at {choice['budget']} tokens on half A: `{choice['selector']}`, {a}. On half B: {b}."


def by_budget(rows: Sequence[Row], shown: Any) -> str:
    """A line for each cache, a column for each budget; the full cache, which has no budget, has the same figure in all
    of them.
    """
    budgets = list(dict.fromkeys(row["budget"] for row in rows if row["budget"])) or ["all"]
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        for budget in [row["budget"]] if row["budget"] else budgets:
            cells.setdefault(row["cache"], {})[budget] = shown(row)
    return table(("cache", *budgets), [[label(name), *line.values()] for name, line in cells.items()])


def spread(rows: Sequence[Row], axis: str) -> str:
    """Recall: a line for each cache and budget, a column for each value of the axis."""
    values = sorted({row[axis] for row in rows})
    cells: dict[tuple[str, str], dict[Any, list[Row]]] = {}
    for row in rows:
        cells.setdefault((row["cache"], row["budget"] or ""), {}).setdefault(row[axis], []).append(row)
    lines = [
        [label(cache), budget, *(_decimals(_recall(line[value])) for value in values)]
        for (cache, budget), line in cells.items()
    ]
    return table(("cache", "budget", *map(str, values)), lines)


def _recall(rows: Sequence[Row]) -> float:
    """The recall over all answers of these rows."""
    return float(sum(row["recall"] * row["answers"] for row in rows) / sum(row["answers"] for row in rows))


def label(cache: str) -> str:
    return LABELS.get(cache, f"`{cache}`")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _section(title: str, body: str) -> Iterator[str]:
    yield f"**{title}**\n"
    yield body + "\n"


def _acceptance(row: Row) -> str:
    return _pair(row["acceptance"])


def _share(name: str) -> Any:
    return lambda row: _decimals(row[name])


def _pair(rates: dict[str, float]) -> str:
    return f"{_decimals(rates['T0'])} / {_decimals(rates['T1'])}"


def _decimals(value: float) -> str:
    """Three decimals, without the zero before the point, so that only what is 1 looks like 1."""
    shown = f"{value:.3f}"
    if shown == "1.000" and value != 1:
        shown = "0.999+"
    return shown.removeprefix("0")
