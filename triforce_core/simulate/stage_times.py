"""The time of a pass, interpolated in a table of measured points."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from triforce_core.simulate.scenario import StagePoint


def piecewise_linear(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """y at x by linear interpolation between the points (xs ascending). Below the first point y is constant. Above the
    last, the line through the last two goes on, but never falls, because a wider pass is never faster.
    """
    if x <= xs[0] or len(xs) == 1:
        return ys[0]
    right = min(bisect_right(xs, x), len(xs) - 1)
    left = right - 1
    slope = (ys[right] - ys[left]) / (xs[right] - xs[left])
    if x > xs[right]:
        return ys[right] + max(slope, 0.0) * (x - xs[right])
    return ys[left] + slope * (x - xs[left])


class StageTimes:
    """Milliseconds of a tier's pass by (batch, tokens, context).

    Interpolated linearly between the token counts of each batch size, then between batch sizes, then between contexts:
    on a full grid this is bilinear (trilinear with contexts), and missing points are allowed. A single point is a
    constant.
    """

    def __init__(self, points: Sequence[StagePoint]) -> None:
        table: dict[int, dict[int, dict[int, float]]] = {}
        for point in points:
            table.setdefault(point.context or 0, {}).setdefault(point.batch, {})[point.tokens] = point.ms
        self.table = {
            context: {batch: sorted(row.items()) for batch, row in sorted(batches.items())}
            for context, batches in sorted(table.items())
        }
        self.known: dict[tuple[int, float, float], float] = {}
        self.constant = points[0].ms if len(points) == 1 else None

    def ms(self, batch: int, tokens: float, context: float) -> float:
        """Milliseconds of a pass over `batch` requests with, on average, `tokens` query tokens and `context` tokens of
        KV.
        """
        if self.constant is not None:
            return self.constant
        place = (batch, tokens, context if len(self.table) > 1 else 0.0)
        if place not in self.known:
            by_context = [self._at(batches, batch, tokens) for batches in self.table.values()]
            self.known[place] = piecewise_linear(list(self.table), by_context, context)
        return self.known[place]

    @staticmethod
    def _at(batches: dict[int, list[tuple[int, float]]], batch: int, tokens: float) -> float:
        by_batch = [piecewise_linear([x for x, _ in row], [ms for _, ms in row], tokens) for row in batches.values()]
        return piecewise_linear(list(batches), by_batch, batch)
