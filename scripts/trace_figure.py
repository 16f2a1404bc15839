"""`python -m scripts.trace_figure SPANS.jsonl FIGURE.svg` draws the last completion in a file of traces, as the file
exporter of OpenTelemetry's collector writes it: OTLP's JSON, one export a line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

WIDTH, LEFT, RIGHT, ROW, TOP = 760, 190, 20, 30, 20
INK, GREY, AXIS = "#1f2430", "#6b7280", "#d1d5db"
COLOURS = {"queue": "#9ca3af", "prefill": "#7c86e0", "rounds": "#4f5bd5", "retrieval": "#1c8fb5", "draft": "#2e9e5b"}
TOLD = {  # what is written of a span, after its time
    "prefill": ("{prompt_tokens} tokens, {cached_tokens} of them found",),
    "rounds": ("{rounds} rounds, {tokens} tokens: {tokens_per_round:.1f} a round",),
    "retrieval": ("{passes} passes; {accepted} of {proposed} drafted tokens accepted",),
    "draft": ("{passes} passes; {accepted} of {proposed} drafted tokens accepted",),
}


class Span(NamedTuple):
    name: str
    id: str
    parent: str
    began: int  # nanoseconds
    ended: int
    figures: dict[str, Any]  # without `triforce.`


def spans(path: Path) -> Iterator[Span]:
    for line in path.read_text(encoding="utf-8").splitlines():
        for resource in json.loads(line)["resourceSpans"]:
            for each in (span for scope in resource["scopeSpans"] for span in scope["spans"]):
                figures = {pair["key"].removeprefix("triforce."): value(pair["value"]) for pair in each["attributes"]}
                times = int(each["startTimeUnixNano"]), int(each["endTimeUnixNano"])
                yield Span(each["name"], each["spanId"], each.get("parentSpanId", ""), *times, figures)


def value(given: dict[str, Any]) -> Any:
    [(kind, found)] = given.items()
    return int(found) if kind == "intValue" else found


def rows(found: list[Span]) -> list[tuple[int, Span]]:
    """The last call with rounds and all below it, each with its depth."""
    by_id = {span.id: span for span in found}
    rounds = max((span for span in found if span.name == "rounds"), key=lambda span: span.ended)

    def below(span: Span, depth: int) -> Iterator[tuple[int, Span]]:
        yield depth, span
        for child in sorted((each for each in found if each.parent == span.id), key=lambda each: each.began):
            yield from below(child, depth + 1)

    return list(below(by_id[rounds.parent], 0))


def drawn(shown: list[tuple[int, Span]]) -> str:
    """The picture: a row for each span."""
    root = shown[0][1]
    scale = (WIDTH - LEFT - RIGHT) / (root.ended - root.began)
    height = TOP + ROW * len(shown) + 34
    bottom = height - 26
    made = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" font-family="sans-serif"'
        f' font-size="13"><title>The spans of one request</title>',
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
        f'<path d="M{LEFT} {bottom}H{WIDTH - RIGHT}" stroke="{AXIS}"/>',
        text(LEFT, bottom + 16, "0", GREY, "start"),
        text(WIDTH - RIGHT, bottom + 16, milliseconds(root.ended - root.began), GREY, "end"),
    ]
    for row, (depth, span) in enumerate(shown):
        left, top = LEFT + scale * (span.began - root.began), TOP + ROW * row
        width = max(1.0, scale * (span.ended - span.began))
        colour = COLOURS.get(span.name, INK)
        made.append(text(16 + 14 * depth, top + 14, span.name, INK, "start"))
        made.append(f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="20" rx="3" fill="{colour}"/>')
        said = ", ".join(
            [milliseconds(span.ended - span.began), *(each.format(**span.figures) for each in TOLD.get(span.name, ()))]
        )
        room = 7 * len(said)
        if left + width + room + 12 < WIDTH - RIGHT:
            made.append(text(left + width + 6, top + 14, said, INK, "start"))
        elif width > room:
            made.append(text(left + 6, top + 14, said, "#ffffff", "start"))
        else:
            made.append(text(left - 6, top + 14, said, INK, "end"))
    return "\n".join([*made, "</svg>", ""])


def text(x: float, y: float, said: str, colour: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y}" fill="{colour}" text-anchor="{anchor}">{escape(said)}</text>'


def milliseconds(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:.3g} ms" if nanoseconds < 1e9 else f"{nanoseconds / 1e9:.2f} s"


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.write_text(drawn(rows(list(spans(source)))), encoding="utf-8")
