"""scripts/gpu_served.py on a CPU: it says that the tokens are equal, before and after a tier is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.random_models import random_model
from tests.starting import LocalRay, nothing_left

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_three_actors_on_one_gpu_decode_what_the_local_engine_does(tmp_path: Path, local_ray: LocalRay) -> None:
    """Ray is told of a GPU, so that the actors share it as on a machine that has one."""
    local_ray.end()
    random_model(num_hidden_layers=4).config.save_pretrained(tmp_path)
    out = tmp_path / "out.json"
    geometry = ("--geometry", str(tmp_path / "config.json"), "--layers", "2", "--no-demo")
    command = [sys.executable, "-m", "scripts.gpu_served", str(out), "--device", "cpu", *geometry]
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    with nothing_left():
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(out.read_text()).values()
    for name in ("local_plain", "local_speculative", "served_plain", "served_speculative", "killed", "after"):
        assert found[name]["equal"], name
        assert found[name]["equal_share"] == 1.0, name
        assert found[name]["ms_per_token"] > 0, name
    assert found["restarted"]
    assert {tuple(each["gpus"]) for each in found["processes"].values()} == {(0,)}
    assert len({each["pid"] for each in found["processes"].values()}) == 3
    plain, speculative = found["served_plain"]["from"], found["served_speculative"]["from"]
    assert plain == {"draft": 0, "retrieval": 0, "target": 256}
    assert speculative["target"] < found["killed"]["from"]["target"], "some rounds went without it"
    assert found["after"]["from"]["retrieval"] > 0
