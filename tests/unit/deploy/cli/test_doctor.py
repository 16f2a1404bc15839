"""The checks of a start, which `triforce doctor` prints: what they find here, and where something is wrong."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deploy import checks
from deploy.checks import CHECKS, memory, parameters
from deploy.cli.options import settings_from
from tests.command_line import Refusals, run
from tests.random_models import random_model
from tests.starting import nothing_left
from triforce_core.config import Settings
from triforce_core.demo import weights_dir
from triforce_core.errors import InvalidValueError
from triforce_core.machine import cgroup as container
from triforce_core.machine import cores
from triforce_core.machine import memory as kv_memory

REPOSITORY = Path(__file__).resolve().parents[4]
MIB = 2**20
ON_CUDA = {"device": "cuda"}


def settings(**given: Any) -> Settings:
    """The defaults in float32, overridden by settings by full name, with `__` in place of the dot."""
    return settings_from(None, {"dtype": "float32"} | {name.replace("__", "."): v for name, v in given.items()})


def refused(name: str, given: Settings, *named: str) -> None:
    """The check of this name refuses these settings, in one line that has all of `named`."""
    with pytest.raises(InvalidValueError) as refusal:
        (CHECKS | {"memory": memory})[name](given)
    assert "\n" not in str(refusal.value)
    for each in named:
        assert each in str(refusal.value)


@contextmanager
def taken_port(host: str = "127.0.0.1") -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind((host, 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def free_ports(tmp_path: Path) -> Path:
    """A settings file with two ports that are free."""
    with taken_port() as one, taken_port("0.0.0.0") as other:
        path = tmp_path / "settings.yaml"
        path.write_text(f"server: {{port: {one}, grpc_port: {other}}}\n")
    return path


def test_this_machine_has_no_problem(free_ports: Path) -> None:
    """The whole command runs. It starts nothing, and says something about everything."""
    command = [sys.executable, "-m", "deploy.cli", "doctor", "--json", "--config", str(free_ports)]
    with nothing_left():
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPOSITORY, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert report["problems"] == 0
    assert [each["name"] for each in report["checks"]] == [*CHECKS, "memory"]
    assert all(each["status"] == "ok" and each["found"] for each in report["checks"])


def test_a_problem_is_one_line_and_exit_code_1_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], free_ports: Path
) -> None:
    free_ports.write_text(free_ports.read_text() + "placement: {target: {cores: [99999]}}\n")
    monkeypatch.setitem(checks.CHECKS, "keys", lambda settings: str(1 / 0))
    assert run(monkeypatch, "doctor", "--config", str(free_ports)) == 1
    lines = {line.split()[1]: line for line in capsys.readouterr().out.splitlines()}
    assert list(lines) == [*CHECKS, "memory"]
    assert {name for name, line in lines.items() if line.startswith("problem")} == {"cpu", "keys"}
    assert "placement.target.cores: (99999,) must be among the cores that this process may use" in lines["cpu"]
    assert "this could not be checked: ZeroDivisionError" in lines["keys"]


def test_a_start_makes_the_same_checks(refusals: Refusals, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CHECKS:
        monkeypatch.setitem(checks.CHECKS, name, lambda settings, name=name: made.append(name))
    made: list[str] = []

    def last(settings: Settings) -> str:
        raise InvalidValueError("placement", "here", "is refused by the last check")

    monkeypatch.setitem(checks.CHECKS, "placement", last)
    refusals.check(["placement: 'here' is refused by the last check"], "serve")
    assert made == list(CHECKS)[:-1]


def test_settings_that_cannot_be_read_are_refused_as_everywhere(refusals: Refusals) -> None:
    refusals.check(["config", "/nowhere.yaml"], "doctor", "--config", "/nowhere.yaml")
    refusals.check(["resident_layers 2 must be 0"], "doctor", "--resident-layers", "2")


def test_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert f"{len(os.sched_getaffinity(0))} cores; dtype float32" in CHECKS["cpu"](settings())
    monkeypatch.setattr(cores, "CPU_LATENCY", tmp_path / "missing")
    refused("cpu", settings(placement__cpu_latency_us=7), "placement.cpu_latency_us: 7 cannot be asked")


def test_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "sees no GPU" in CHECKS["device"](settings())
    refused("device", settings(**ON_CUDA), "device: 'cuda' needs a GPU: PyTorch")
    for name, value in (("is_available", True), ("device_count", 2), ("get_device_name", "H100")):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    assert CHECKS["device"](settings(**ON_CUDA)).endswith("sees H100, H100")
    refused("device", settings(**ON_CUDA, dtype="bfloat16"), "dtype: 'bfloat16' needs a GPU of compute capability 8.0")


def test_ports() -> None:
    with taken_port() as one, taken_port("0.0.0.0") as other:
        taken = settings(server={"port": one})
        refused("ports", taken, f"server.port: {one} must be free on 127.0.0.1")
        refused("ports", settings(server={"port": 1 + one, "grpc_port": other}), "server.grpc_port")
    refused("ports", settings(server={"host": "nowhere.invalid"}), "server.host: 'nowhere.invalid' is no address")
    refused("ports", settings(server={"port": 9000, "grpc_port": 9000}), "must not be server.port")


def test_models(tmp_path: Path) -> None:
    found = CHECKS["models"](settings())
    assert "target demo (vocabulary of 4096, context of 16384 tokens), drafter demo" in found
    refused("models", settings(target__model="/nowhere"), "target: '/nowhere'", "config.json")
    small = str(tmp_path / "small")
    random_model().save_pretrained(small)
    refused("models", settings(draft__model=small), "has 256 tokens: must have the target's 4096")


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the demo drafter, as a model of one's own."""
    folder = tmp_path / "drafter"
    shutil.copytree(weights_dir("drafter"), folder)
    return folder


def missing(file: Path) -> None:
    file.unlink()


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def pointer(file: Path) -> None:
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 2707120\n")


@pytest.mark.parametrize("damage", [missing, cut, pointer])
def test_weights_that_cannot_be_read(damage: Callable[[Path], None], copied: Path) -> None:
    given = settings(draft__model=str(copied))
    assert CHECKS["weights"](given) == f"target demo: 9.4M parameters; drafter {copied}: 1.4M parameters"
    damage(copied / "model.safetensors")
    refused("weights", given, "drafter: ", "has no weights that can be read")


def test_weights_in_shards(tmp_path: Path) -> None:
    index = {"metadata": {}, "weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"}}
    random_model().config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "1.safetensors")
    with pytest.raises(FileNotFoundError):
        parameters(str(tmp_path), "target")
    save_file({"b": torch.zeros(4), "c": torch.zeros(5)}, tmp_path / "2.safetensors")
    assert parameters(str(tmp_path), "target") == 2 * 3 + 4 + 5


def test_weights_to_download() -> None:
    assert "drafter nobody/nothing: not downloaded yet" in CHECKS["weights"](settings(draft__model="nobody/nothing"))


def test_memory_is_for_the_weights_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiers of one process share weights. Processes with GPUs of their own need not fit one."""
    target, drafter = (parameters("demo", role) or 0 for role in ("target", "drafter"))

    def needs(number: int, **given: Any) -> None:
        monkeypatch.setattr(kv_memory, "free_bytes", lambda place: 4 * number + 1)
        memory(settings(**given))
        monkeypatch.setattr(kv_memory, "free_bytes", lambda place: 4 * number)
        refused("memory", settings(**given), "weights of demo", "GiB")

    needs(2 * target + drafter)
    needs(target + drafter, placement__colocate="all")
    needs(2 * target + drafter, target__tensor_parallel=2)
    needs(2 * (2 * target + drafter), server={"replicas": {"min": 2, "max": 2}})
    needs(target, placement={tier: {"gpus": 1} for tier in ("target", "retrieval", "draft")})


@pytest.mark.parametrize(("limit_mib", "fits"), [(10, False), (8000, True)])
def test_memory_of_a_container(limit_mib: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = tmp_path / "sys/fs/cgroup"
    for folder in (group, tmp_path / "proc/self"):
        folder.mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    for file, text in (("memory.max", limit_mib * MIB), ("memory.current", 0), ("memory.stat", "anon 0")):
        (group / file).write_text(f"{text}\n")
    limited = container.container_free(tmp_path)
    for module in (container, kv_memory):
        monkeypatch.setattr(module, "container_free", lambda: limited)
    given = settings(dtype="bfloat16")
    if fits:
        assert "of the 7.81 GiB that are free" in memory(given)
    else:
        refused("memory", given, "GiB")


def test_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CHECKS["placement"](settings()) == "target; retrieval; draft"
    three = settings(placement={tier: {"gpus": 1} for tier in ("target", "retrieval", "draft")}, **ON_CUDA)
    refused("placement", three, "cannot be here: no node has")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for count in (3, 2):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        if count == 3:
            assert "target (1 GPU a rank)" in CHECKS["placement"](three)
    refused("placement", three, "PACK cannot lay out")
    refused("placement", settings(placement={"strategy": "STRICT_SPREAD"}), "STRICT_SPREAD cannot lay out")
    assert "only Ray knows" in CHECKS["placement"](settings(placement__draft={"labels": {"zone": "a"}}))
