"""Memory at a 16K context: nothing may hold a second copy of the KV, or of scores over it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from triforce_core.models.files import resolve

ROOT = Path(__file__).parents[2]
CONTEXT = 16_384
ALLOWED = 500 * 10**6  # bytes, beyond the imports, the KV and the weights


@pytest.fixture
def long_target(tmp_path: Path) -> Path:
    """The demo target with room for more positions than it may have been trained for."""
    shutil.copytree(resolve("demo", "target"), tmp_path / "target")
    path = tmp_path / "target" / "config.json"
    config = json.loads(path.read_text())
    config["max_position_embeddings"] = max(CONTEXT, config["max_position_embeddings"])
    path.write_text(json.dumps(config))
    return tmp_path / "target"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_memory_at_16k(dtype: str, long_target: Path) -> None:
    command = [sys.executable, "-m", "tests.exactness.measure_memory"]
    arguments = [str(long_target), resolve("demo", "drafter"), dtype, str(CONTEXT)]
    done = subprocess.run(command + arguments, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["tokens"] == 64
    assert found["accepted"] > 10, "all tiers were meant to take part"
    working = found["peak"] - found["imported"] - found["kv"] - found["weights"]
    megabytes = {name: round(found[name] / 1e6) for name in ("imported", "kv", "weights", "peak")}
    print(f"\n{dtype}: {megabytes} MB; {working / 1e6:.0f} MB beyond imports, KV and weights")
    assert working < ALLOWED
