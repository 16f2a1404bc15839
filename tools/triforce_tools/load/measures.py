"""The figures of a load, computed from its records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from triforce_core.errors import require
from triforce_tools.load.answers import Record


@dataclass(frozen=True, slots=True)
class Goals:
    """The latencies that a good answer keeps, in milliseconds; None sets none."""

    ttft_ms: float | None = None
    itl_ms: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("slo-ttft-ms", self.ttft_ms), ("slo-itl-ms", self.itl_ms)):
            require(value is None or value > 0, name, value, "must be above 0")

    @property
    def are_set(self) -> bool:
        return self.ttft_ms is not None or self.itl_ms is not None

    def met_by(self, record: Record) -> bool:
        """Whether the answer is whole, its first text came in time, and the mean gap between its chunks is within the
        goal.
        """
        gaps_s = record.gaps_s
        mean_gap_s = sum(gaps_s) / len(gaps_s) if gaps_s else 0.0
        return (
            record.failure is None
            and (self.ttft_ms is None or 1e3 * record.ttft_s <= self.ttft_ms)
            and (self.itl_ms is None or 1e3 * mean_gap_s <= self.itl_ms)
        )


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    """p50, p90, p99 and the maximum in milliseconds; None if there are no values."""
    if not seconds:
        return None
    p50, p90, p99, largest = (round(1e3 * float(numpy.percentile(seconds, p)), 3) for p in (50, 90, 99, 100))
    return {"p50": p50, "p90": p90, "p99": p99, "max": largest}


def errors_by_kind(records: Iterable[Record]) -> dict[str, dict[str, Any]]:
    """How many requests failed in each way, with the message of the first; refusals are counted elsewhere."""
    kinds: dict[str, dict[str, Any]] = {}
    for record in records:
        if record.failure is not None and not record.failure.refused:
            kind = kinds.setdefault(record.failure.kind, {"count": 0, "first": str(record.failure)})
            kind["count"] += 1
    return kinds


def figures_of(records: Sequence[Record], goals: Goals) -> dict[str, Any]:
    """The figures, ready for JSON. Latencies are those of whole answers; rates are over the time from the load's start
    to the end of its last request.
    """
    whole = [record for record in records if record.failure is None]
    seconds = max((record.ended_s for record in records), default=0.0)
    usages = [record.usage for record in whole if record.usage is not None]
    tokens_in, tokens_out = (
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
    )

    def per_s(count: float) -> float | None:
        return round(count / seconds, 3) if seconds else None

    good = sum(goals.met_by(record) for record in records)
    return {
        "seconds": round(seconds, 3),
        "requests": len(records),
        "answered": len(whole),
        "refused": sum(record.failure is not None and record.failure.refused for record in records),
        "errors": errors_by_kind(records),
        "ttft_ms": percentiles_ms([record.ttft_s for record in whole]),
        "itl_ms": percentiles_ms([gap for record in whole for gap in record.gaps_s]),
        "tpot_ms": percentiles_ms([each for record in whole if (each := record.tpot_s) is not None]),
        "e2e_ms": percentiles_ms([record.e2e_s for record in whole]),
        "requests_per_s": per_s(len(whole)),
        "usage_stated": len(usages),
        "input_tokens": tokens_in,
        "output_tokens": tokens_out,
        "input_tokens_per_s": per_s(tokens_in),
        "output_tokens_per_s": per_s(tokens_out),
        "goodput": {
            "slo_ttft_ms": goals.ttft_ms,
            "slo_itl_ms": goals.itl_ms,
            "share": round(good / len(records), 4) if records else None,
            "requests_per_s": per_s(good),
        }
        if goals.are_set
        else None,
        "sent_late_ms": percentiles_ms([record.sent_s - record.due_s for record in records]),
    }
