"""What the pages say of other servers is in the figures beside them."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from triforce_tools.peers.table import peers_table

ROOT = Path(__file__).resolve().parents[3]
FIGURES = json.loads((ROOT / "docs/benchmarks/peers.json").read_text(encoding="utf-8"))
# In the order in which README tells their medians.
TOLD = [
    *(("ours", "controlled", 0.0), ("ours-auto", "controlled", 0.0), ("vllm-ngram", "plain", 0.0)),
    *(("transformers", "plain", 0.0), ("vllm", "plain", 0.0), ("llama.cpp", "plain", 0.0)),
    *(("ours", "controlled", 0.8), ("ours-auto", "controlled", 0.8)),
    *(("vllm", "plain", 0.8), ("transformers", "plain", 0.8)),
]


def test_the_table_is_that_of_the_json() -> None:
    assert peers_table(FIGURES) in (ROOT / "docs/benchmarks/serving.md").read_text(encoding="utf-8")


def test_readme_tells_these_medians() -> None:
    words = (ROOT / "README.md").read_text(encoding="utf-8").partition("`make bench-peers`")[2].split()
    found = iter(word.strip(",;.:*") for word in words)
    for peer, mode, temperature in TOLD:
        named = {"peer": peer, "mode": mode, "temperature": temperature}
        [row] = [row for row in FIGURES["rows"] if named.items() <= row.items()]
        assert f"{median(row['ms_per_token']):.1f}" in found, named
