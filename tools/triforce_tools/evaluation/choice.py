"""The choice of a selector: the best on one half of the held-out files, reported on the other half."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

# Retrieval's acceptance on PG-19, and needle recall at a budget of 4K tokens: Sun et al. 2024, arXiv 2404.11912, whose
# models (Llama-2-7B-128K and others) and texts are not those measured here.
PUBLISHED = {
    "source": "arXiv 2404.11912, other models and texts",
    "rows": [
        {"cache": "retrieval", "pg19_acceptance": 0.965, "needle": 0.988},
        {"cache": "streaming_llm", "pg19_acceptance": 0.916, "needle": 0.052},
        {"cache": "h2o", "pg19_acceptance": 0.918, "needle": 0.074},
    ],
}
BUDGET = "1024"  # the budget at which selectors compete: the default of `retrieval.budget`


def choose(rows: Sequence[dict[str, Any]], selectors: Sequence[str]) -> dict[str, Any] | None:
    """The selector with the highest acceptance at temperature 0 on half A, and its acceptance on half B.

    Args:
        rows: figures of held-out files, with `cache`, `budget`, `half`, `tokens` and `acceptance`.
        selectors: the names that compete.

    Returns:
        None where no selector was measured at the budget, or no acceptance. `error` is the standard error at T = 0 if
        tokens were independent; as those of one file resemble each other, it is rather more.
    """
    by_half: dict[str, dict[str, dict[str, float]]] = {"A": {}, "B": {}}
    for row in rows:
        if row["budget"] == BUDGET and row["cache"] in selectors and row["half"] in by_half and "acceptance" in row:
            rate = row["acceptance"]["T0"]
            error = {"error": math.sqrt(rate * (1 - rate) / row["tokens"])}
            by_half[row["half"]][row["cache"]] = row["acceptance"] | error
    if not by_half["A"]:
        return None
    best = max(by_half["A"], key=lambda name: by_half["A"][name]["T0"])
    return {"budget": BUDGET, "selector": best, "half_a": by_half["A"][best], "half_b": by_half["B"][best]}
