"""scripts/cluster_check.sh against programs in place of kubectl and helm, which keep a cluster's state in a file."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "cluster_check.sh"
STEPS = ["KubeRay's operator is there", "nothing of this name is there", "install", "ready", "helm test",
         "a completion through the Service", "an upgrade under load", "a worker killed under a stream", "two replicas",
         "uninstall", "nothing is left"]  # fmt: skip

# A cluster whose pods are replaced two seconds after an upgrade. WRONG says what goes wrong in it.
PROGRAM = f"""#!{sys.executable}
import json, os, pathlib, sys, time
file = pathlib.Path(os.environ["STATE"])
state = json.loads(file.read_text()) if file.exists() else {{"installed": False, "at": 0, "upgrades": 0, "calls": []}}
program, words, wrong = pathlib.Path(sys.argv[0]).name, sys.argv[1:], os.environ["WRONG"]
words = words[2:] if words[0] == "--namespace" else words
line = " ".join(words)
state["calls"].append(f"{{program}} {{line}}")
status = 0
if program == "helm":
    if words[0] == "install":
        state.update(installed=True, workers=1)
    elif words[0] == "upgrade":
        state.update(at=time.time() + 2, upgrades=state["upgrades"] + 1)
        state["workers"] = 2 if "replicas.min=2" in line and wrong != "scale" else 1
    elif words[0] == "uninstall":
        state["installed"] = False
    elif wrong == "test":
        status = 1
elif words[0] == "get" and "customresourcedefinition" in line:
    status = int(wrong == "operator")
elif words[0] == "get" and words[1] == "rayservice":
    print(f"check-{{state['upgrades'] - (time.time() < state['at'])}}", end="")
elif words[0] == "get" and "node-type=head" in line:
    print("head", end="")
elif words[0] == "get" and "node-type=worker" in line:
    print("True\\n" * state["workers"] if "Ready" in line else "worker")
elif words[0] == "get" and words[1] == "rayclusters" and "wide" not in words and state["installed"]:
    print("raycluster/one")
elif words[0] == "get" and "--selector" in words:
    if state["installed"] or (wrong == "left" and any("uninstall" in each for each in state["calls"])):
        print("pod/some")
elif words[0] == "delete":
    status = int(wrong == "delete" and "--force" in words)
elif words[0] == "wait" and wrong == "hang":
    time.sleep(60)
elif words[0] == "exec" and "kill -KILL -1" in line:
    time.sleep(2 * (wrong == "early"))
    status = 137
elif words[0] == "exec":
    long = "max_tokens=2000" in line
    print('"a te"', flush=True)
    file.write_text(json.dumps(state))
    time.sleep(3 if long and wrong != "early" else 0.1)
    state = json.loads(file.read_text())
    resumed = "retries=1000" in line
    status = int(wrong == "load" and "max_tokens=4," in line)
    print('"xt"\\n""' if resumed and wrong != "stream" else '"xt"' if not resumed else '"xts"')
file.write_text(json.dumps(state))
sys.exit(status)
"""


def check(folder: Path, wrong: str, *arguments: str, **variables: str) -> tuple[int, dict[str, str], list[str]]:
    """The script's exit status, the result of each step, and the calls of both programs."""
    for name in ("kubectl", "helm"):
        (folder / name).write_text(PROGRAM)
        (folder / name).chmod(0o755)
    given = {"PATH": f"{folder}:{os.environ['PATH']}", "STATE": str(folder / "state"), "WRONG": wrong, **variables}
    done = subprocess.run([SCRIPT, *arguments], env=given, capture_output=True, text=True, timeout=200, check=False)
    lines = re.findall(r"^(passed|FAILED) +\d+ s  (.*)$", done.stdout, re.MULTILINE)
    results = {name: result for result, name in lines}
    assert results, done.stdout + done.stderr
    return done.returncode, results, json.loads((folder / "state").read_text())["calls"]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_shellcheck_finds_nothing() -> None:
    done = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_every_step_passes_in_a_cluster_that_works(tmp_path: Path) -> None:
    status, results, calls = check(tmp_path, "nothing", "--set", "image.repository=here/triforce serve")
    assert (status, results) == (0, dict.fromkeys(STEPS, "passed"))
    changes = [each for each in calls if each.startswith(("helm install", "helm upgrade"))]
    assert len(changes) == 3
    assert all("image.repository=here/triforce serve" in each for each in changes)
    deleted = [each for each in calls if "delete" in each]
    assert deleted[0].startswith("kubectl delete pod worker --grace-period=0")
    assert deleted[1:] == ["kubectl delete pod triforce-check-test --ignore-not-found"]


FOUND = {
    "operator": (["KubeRay's operator is there"], STEPS[1:]),
    "test": (["helm test"], STEPS[5:9]),
    "load": (["an upgrade under load"], []),
    "stream": (["a worker killed under a stream"], []),
    "early": (["a worker killed under a stream"], []),
    "delete": (["a worker killed under a stream"], []),
    "scale": (["two replicas"], []),
    "left": (["nothing is left"], []),
    "hang": (["ready"], STEPS[4:9]),
}


slowly = {each: pytest.param(each, marks=pytest.mark.slow) for each in ("scale", "left", "hang")}


@pytest.mark.parametrize("wrong", [slowly.get(each, each) for each in FOUND])
def test_what_goes_wrong_is_found_in_time_and_all_is_removed_again(wrong: str, tmp_path: Path) -> None:
    expected, left_out = FOUND[wrong]
    began = time.monotonic()
    status, results, calls = check(tmp_path, wrong, LIMIT="12")
    assert status == 1
    assert [name for name, result in results.items() if result == "FAILED"] == expected
    assert results.keys() == set(STEPS) - set(left_out)
    assert ("helm uninstall" in " ".join(calls)) == (wrong != "operator")
    assert time.monotonic() - began < 60


def test_an_interrupt_ends_it(tmp_path: Path) -> None:
    for name in ("kubectl", "helm"):
        (tmp_path / name).write_text(PROGRAM)
        (tmp_path / name).chmod(0o755)
    given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "STATE": str(tmp_path / "state"), "WRONG": "hang"}
    with subprocess.Popen([SCRIPT], env=given, stdout=subprocess.PIPE, text=True, start_new_session=True) as running:
        assert running.stdout is not None
        lines = iter(running.stdout)
        assert any(line.startswith("== ready") for line in lines)
        time.sleep(0.5)
        os.killpg(running.pid, signal.SIGINT)
        assert "interrupted" in "".join(lines)
        assert running.wait(5) == 130


def test_what_is_there_already_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "state").write_text(json.dumps({"installed": True, "at": 0, "upgrades": 0, "workers": 1, "calls": []}))
    status, results, calls = check(tmp_path, "nothing")
    assert (status, results["nothing of this name is there"]) == (1, "FAILED")
    assert not [each for each in calls if each.startswith("helm")]
