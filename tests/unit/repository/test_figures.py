"""The tables of other servers on the pages are those of the figures beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from triforce_tools.peers.table import peers_table

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks/serving.md"])
def test_the_table_is_that_of_the_json(page: str) -> None:
    figures = json.loads((ROOT / "docs/benchmarks/peers.json").read_text(encoding="utf-8"))
    assert peers_table(figures) in (ROOT / page).read_text(encoding="utf-8")
