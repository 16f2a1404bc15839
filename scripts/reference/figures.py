"""The figures of docs/how-it-works.md, as SVG. Their background is light on dark pages as well."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape

INK, FAINT, GROUND = "#1f2430", "#6b7280", "#ffffff"
DRAFT, RETRIEVAL, TARGET = "#2e9e5b", "#1c8fb5", "#4f5bd5"
WIDTH = 760


def picture(height: int, title: str, parts: Iterable[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" font-family="sans-serif"'
        f' font-size="14"><title>{escape(title)}</title>'
    )
    arrow = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{FAINT}"/></marker></defs>'
    )
    ground = f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{GROUND}"/>'
    return "\n".join([head, arrow, ground, *parts, "</svg>"]) + "\n"


def box(x: float, y: float, width: float, height: float, colour: str, *, filled: bool = True) -> str:
    fill = colour if filled else "none"
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" stroke="{colour}"/>'


def words(x: float, y: float, text: str, colour: str = INK, *, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    line = f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
    return f'{line} stroke="{FAINT}" stroke-width="1.5" marker-end="url(#head)"/>'


def cells(x: float, y: float, count: int, colour: str, chosen: Iterable[int] | None = None) -> list[str]:
    """A KV cache as a row of chunks; those that are not chosen are empty."""
    filled = set(range(count) if chosen is None else chosen)
    return [box(x + 12 * i, y, 9, 20, colour, filled=i in filled) for i in range(count)]


def tiers() -> str:
    rows = [
        ("target", TARGET, "the target model", "its full KV cache", 36, None),
        ("retrieval", RETRIEVAL, "the target's weights", "the chunks that matter", 36, (0, 7, 8, 15, 22, 23, 34, 35)),
        ("draft", DRAFT, "a tiny model, or prompt lookup", "the first and latest tokens", 36, (0, 32, 33, 34, 35)),
    ]
    parts = []
    for index, (name, colour, model, cache, count, chosen) in enumerate(rows):
        y = 20 + 110 * index
        parts += [box(20, y, 240, 56, colour), words(140, y + 24, name, GROUND, anchor="middle", bold=True)]
        parts += [words(140, y + 44, model, GROUND, anchor="middle"), *cells(300, y + 4, count, colour, chosen)]
        parts.append(words(300, y + 46, cache, FAINT))
    for y in (76, 186):
        parts += [arrow(100, y + 4, 100, y + 50), arrow(180, y + 50, 180, y + 4)]
        parts += [words(92, y + 32, "work", FAINT, anchor="end"), words(188, y + 32, "proposals", FAINT)]
    return picture(326, "Three tiers: each drafts for the one above it, and reads less", parts)


def noise() -> str:
    parts = []
    rows = [("draft", DRAFT, (60, 48, 50, 14)), ("target", TARGET, (62, 52, 56, 20))]
    jitter = (10, 34, 4, 22)  # the noise of this position: the same in every tier
    for index, (name, colour, logits) in enumerate(rows):
        x, bottom = 120 + 320 * index, 150
        parts.append(words(x + 78, 24, f"{name} tier", colour, anchor="middle", bold=True))
        sums = [logit + more for logit, more in zip(logits, jitter, strict=True)]
        best = sums.index(max(sums))
        for i, (logit, more) in enumerate(zip(logits, jitter, strict=True)):
            parts.append(box(x + 42 * i, bottom - logit, 26, logit, colour))
            parts.append(box(x + 42 * i, bottom - logit - more, 26, more, "#e3a008"))
            parts.append(words(x + 42 * i + 13, bottom + 18, "abcd"[i], anchor="middle", bold=i == best))
        parts.append(words(x + 78, bottom + 44, f"largest sum: {'abcd'[best]}", anchor="middle"))
    parts += [box(606, 60, 12, 12, "#e3a008"), words(624, 71, "noise(seed, t, v)")]
    parts += [box(606, 84, 12, 12, TARGET), words(624, 95, "logit, warped")]
    return picture(
        250,
        "Shared noise: both tiers add the same noise and draw the largest sum, so they mostly draw the same token",
        [*parts, words(380, 230, "The draws agree, so the drafted token is accepted.", anchor="middle")],
    )


def retrieval() -> str:
    chosen = (0, 5, 13, 14, 27, 36, 46, 47)
    parts = [words(24, 34, "the target's KV cache, in chunks of 8 tokens"), *cells(24, 46, 48, TARGET)]
    parts += [words(24, 178, "the retrieval tier's cache: a snapshot, and the tokens after it")]
    for place, chunk in enumerate(chosen):
        parts += [box(24 + 12 * chunk, 46, 9, 20, RETRIEVAL), arrow(28 + 12 * chunk, 70, 128 + 12 * place, 140)]
    parts += [*cells(124, 144, 8, RETRIEVAL), *cells(232, 144, 3, FAINT)]
    parts.append(words(736, 34, "score of a chunk: attention of the last 8 queries to it", FAINT, anchor="end"))
    return picture(200, "A snapshot: the chunks that the target's last queries score highest", parts)


def pipelining() -> str:
    def rows(y: float, passes: Iterable[tuple[int, float, float, str]]) -> list[str]:
        """Passes as (row, from, to, label) on a line for each tier, the target on top."""
        colours = (TARGET, RETRIEVAL, DRAFT)
        parts = [words(20, y + 17 + 30 * row, name, FAINT) for row, name in enumerate(("target", "retrieval", "draft"))]
        for row, begin, end, label in passes:
            parts.append(box(100 + begin, y + 30 * row, end - begin - 2, 24, colours[row]))
            parts.append(words(99 + (begin + end) / 2, y + 17 + 30 * row, label, GROUND, anchor="middle"))
        return parts

    turns, together = [], []
    for block, label in enumerate("ABAB"):
        at = 150 * block
        turns += [(2, at, at + 24, label), (1, at + 24, at + 60, label), (0, at + 60, at + 150, label)]
    for block, label in enumerate("ABABAB"):
        at = 60 + 92 * block
        together += [(2, at - 60, at - 36, label), (1, at - 36, at, label), (0, at, at + 92, label)]
    return picture(
        270,
        "Pipelining: while the target verifies one request, the lower tiers draft for another",
        [
            *(words(20, 26, "taking turns: two requests, A and B", bold=True), *rows(38, turns)),
            *(words(20, 160, "working at the same time", bold=True), *rows(172, together)),
        ],
    )


FIGURES: dict[str, Callable[[], str]] = {
    "tiers.svg": tiers,
    "noise.svg": noise,
    "retrieval.svg": retrieval,
    "pipelining.svg": pipelining,
}
