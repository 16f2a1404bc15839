"""The page of the metrics, from the metrics themselves."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from prometheus_client.core import Metric

from deploy.metrics import Meters
from deploy.tier_metrics import COUNTERS, GAUGES, TierFamilies
from scripts.reference.markdown import code, table

OF_GATEWAY = {"triforce_requests": ("status",), "triforce_calls": ("api", "status")}  # labels besides `model_name`


def page() -> str:
    unused: Any = SimpleNamespace(model=SimpleNamespace(name=""), in_flight=0, room=0)  # none is scraped here
    own = {"tier_ready": ("tier",)} | {figure.name: figure.labels for figure in (*GAUGES, *COUNTERS)}
    gateway = [row(family, *OF_GATEWAY.get(family.name, ())) for family in gateway_families(unused)]
    tiers = [row(each, *own.get(each.name.removeprefix("triforce_"), ())) for each in TierFamilies("", {}).collect()]
    header = ("metric", "type", "own labels", "meaning")
    return "\n".join(
        [
            "# Metrics\n",
            "For operators: every metric of `GET /metrics`; [metrics](../metrics.md) says how to use them.\n",
            "All have the label `model_name`. A histogram has the series `_bucket`, `_count` and `_sum`; times are in"
            " seconds.\n",
            "## Of the gateway\n",
            "Counted as requests pass, from the start of the gateway.\n",
            table(header, gateway),
            "## Of the tiers\n",
            "As the tiers report them, so each has the label `replica`, and counters begin anew with each replica.\n",
            table(header, tiers),
        ]
    )


def gateway_families(service: Any) -> Iterable[Metric]:
    return Meters(service).registry.collect()


def row(family: Metric, *labels: str) -> tuple[str, str, str, str]:
    name = family.name + "_total" * (family.type == "counter")
    return code(name), family.type, ", ".join(code(label) for label in labels if label), family.documentation
