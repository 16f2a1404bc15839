"""`triforce doctor`: what it finds on this machine, and on machines with each defect, of which it says what to do."""

from __future__ import annotations

import gc
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from actors import cores as cores_module
from deploy.doctor import CHECKS, examine, machine, room, serving, software
from deploy.doctor.finding import Finding, Status, ok
from tests.command_line import Refusals, run
from tests.random_models import random_model
from tests.starting import nothing_left
from tests.unit.test_precision import cpuinfo
from triforce_core.cli.options import settings_from
from triforce_core.config import DeviceGroup, Settings
from triforce_core.demo import weights_dir
from triforce_core.engine.assembly import draft_proposer, full_kv, retrieval_kv
from triforce_core.errors import InvalidValueError
from triforce_core.kv import container
from triforce_core.kv import memory as kv_memory
from triforce_core.models.load import load_model

REPOSITORY = Path(__file__).resolve().parents[2]
MIB = 2**20


def settings(**given: Any) -> Settings:
    """The defaults in float32, overridden by settings by full name, with `__` in place of the dot."""
    return settings_from(None, {"dtype": "float32"} | {name.replace("__", "."): v for name, v in given.items()})


def found_by(name: str, given: Settings) -> Finding:
    """The finding of the check of this name, as the command would show it."""
    [(_, finding)] = examine(given, {name: CHECKS[name]})
    return finding


def check(finding: Finding, status: str, *named: str) -> None:
    """The finding has this status, its text has all of `named`, and it says what to do unless all is well."""
    assert finding.status == status, finding
    assert bool(finding.advice) == (status != "ok")
    for part in named:
        assert part in f"{finding.found} → {finding.advice}"


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


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """The command exempts objects from garbage collection, because it ends soon. This process goes on, so the exemption
    is undone.
    """
    yield
    gc.unfreeze()


# -- the command -------------------------------------------------------------------------------------------------------


def test_this_machine_has_no_problem(free_ports: Path) -> None:
    """The whole command runs. It starts nothing, and says something about everything."""
    command = [sys.executable, "-m", "triforce_core.cli", "doctor", "--json", "--config", str(free_ports)]
    with nothing_left():
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPOSITORY, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert report["problems"] == 0
    assert [each["name"] for each in report["checks"]] == list(CHECKS)
    assert report["notes"] == sum(each["status"] == "note" for each in report["checks"])
    for each in report["checks"]:
        assert each["found"]
        assert bool(each["advice"]) == (each["status"] != "ok")


def test_a_problem_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], free_ports: Path
) -> None:
    free_ports.write_text(free_ports.read_text() + "placement: {target: {cores: [99999]}}\n")
    assert run(monkeypatch, "doctor", "--config", str(free_ports)) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "cores" in line.split()[:2]] == ["problem"]
    assert len(lines) == len(CHECKS)
    assert last.startswith("1 problem, ")


def test_settings_that_cannot_be_read_are_refused_as_everywhere(refusals: Refusals) -> None:
    refusals.check(["config", "/nowhere.yaml"], "doctor", "--config", "/nowhere.yaml")
    refusals.check(["resident_layers 2 must be 0"], "doctor", "--resident-layers", "2")


def test_a_check_that_fails_is_a_problem_and_the_others_go_on() -> None:
    def broken(_: Settings) -> Finding:
        return ok(str(1 / 0))

    def refused(_: Settings) -> Finding:
        raise InvalidValueError("threads", 0, "must be more")

    findings = dict(examine(settings(), {"one": broken, "two": refused, "three": lambda _: ok("fine")}))
    check(findings["one"], "problem", "could not be checked: ZeroDivisionError: division by zero", "remove the cause")
    check(findings["two"], "problem", "threads: 0 must be more", "change the setting")
    check(findings["three"], "ok")


# -- the machine -------------------------------------------------------------------------------------------------------

AVX2_ONLY, AMX = "flags : fma avx avx2 f16c", "flags : avx2 avx512f avx512_bf16 amx_bf16"


@pytest.mark.parametrize(
    ("line", "dtype", "status", "named"),
    [
        (AVX2_ONLY, "float32", "ok", ["(avx2)", "dtype auto is float32 here"]),
        (AVX2_ONLY, "bfloat16", "note", ["bfloat16 is many times slower", "set dtype: auto or float32"]),
        (AVX2_ONLY, "float16", "note", ["float16 is many times slower", "set dtype: auto or float32"]),
        (AMX, "bfloat16", "ok", ["avx512_bf16, amx_bf16", "dtype auto is bfloat16 here"]),
        (AMX, "float32", "ok", ["dtype auto is bfloat16 here, and float32 is set"]),
        ("flags : sse4_2 avx", "float32", "note", ["neither AVX2 nor NEON", "-cpu host"]),
        ("Features : fp asimd", "float32", "ok", ["(asimd)"]),
        ("nothing : here", "float32", "ok", ["dtype auto is float32 here"]),
    ],
)
def test_cpu(line: str, dtype: str, status: str, named: list[str], tmp_path: Path) -> None:
    check(machine.cpu(settings(dtype=dtype), cpuinfo(tmp_path, line)), status, *named)


def test_cpu_beside_a_gpu(tmp_path: Path) -> None:
    check(machine.cpu(settings(device="cuda", dtype="bfloat16"), cpuinfo(tmp_path, AVX2_ONLY)), "ok")


def test_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    allowed = len(os.sched_getaffinity(0))
    check(machine.cores(settings(threads=1)), "ok", f"{allowed}")
    bound = settings(placement__retrieval={"cores": [0, 99999]})
    check(machine.cores(bound), "problem", "retrieval is bound to cores [0, 99999]", "set placement.retrieval.cores")
    check(machine.cores(settings(threads=allowed + 1)), "note", f"{allowed + 1} threads", f"set threads: {allowed} ")
    monkeypatch.setattr(cores_module, "CPU_LATENCY", tmp_path / "missing")
    awake = found_by("cores", settings(placement__cpu_latency_us=0))
    check(awake, "problem", "placement.cpu_latency_us: 0 cannot be asked", "leave it out")


@pytest.mark.parametrize(
    ("limit", "status"), [("150000 100000", "note"), ("max 100000", "ok"), ("400000 100000", "ok")]
)
def test_cores_of_a_container(limit: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The narrowest limit counts, whichever group states it."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    for folder, text in (("proc/self", None), ("sys/fs/cgroup", "300000 100000"), ("sys/fs/cgroup/pod", limit)):
        (tmp_path / folder).mkdir(parents=True)
        if text:
            (tmp_path / folder / "cpu.max").write_text(text)
    (tmp_path / "proc/self/cgroup").write_text("0::/pod\n")
    finding = machine.cores(settings(threads=2), tmp_path)
    check(finding, status, *(["may use 1.5", "set threads: 1 "] if status == "note" else []))


class Gpus:
    """What a driver, and PyTorch, report of GPUs that this machine does not have."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.monkeypatch, self.folder = monkeypatch, folder
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setenv("PATH", str(folder))
        self.pytorch(0)

    def driver(self, *gpus: str) -> None:
        program = self.folder / "nvidia-smi"
        program.write_text("#!/bin/sh\n" + "".join(f"echo '{gpu}'\n" for gpu in gpus))
        program.chmod(0o755)

    def pytorch(self, count: int, capability: tuple[int, int] = (9, 0), built: str | None = "12.8") -> None:
        major, minor = capability
        has = SimpleNamespace(name="NVIDIA H100", total_memory=80 * 2**30, major=major, minor=minor)
        for name, value in {
            "is_available": lambda: count > 0,
            "device_count": lambda: count,
            "get_device_capability": lambda _: capability,
            "get_device_name": lambda _: has.name,
            "get_device_properties": lambda _: has,
            "get_arch_list": lambda: ["sm_75", "sm_80", "sm_90", "compute_90"],
        }.items():
            self.monkeypatch.setattr(torch.cuda, name, value)
        self.monkeypatch.setattr(torch.version, "cuda", built)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gpus:
    return Gpus(monkeypatch, tmp_path)


ON_CUDA = {"device": "cuda", "dtype": "bfloat16"}


def test_no_gpu(gpus: Gpus) -> None:
    check(machine.gpu(settings()), "ok", "none")
    check(machine.gpu(settings(**ON_CUDA)), "problem", "no NVIDIA driver", "--gpus all", "set device: cpu")


@pytest.mark.parametrize(
    ("built", "advice"), [(None, "install PyTorch's build for CUDA"), ("13.0", "update the NVIDIA driver")]
)
def test_a_gpu_that_pytorch_cannot_use(gpus: Gpus, built: str | None, advice: str) -> None:
    gpus.driver("NVIDIA H100, 550.54.15", "NVIDIA H100, 550.54.15")
    gpus.pytorch(0, built=built)
    named = ["2 × NVIDIA H100, driver 550.54.15", advice]
    check(machine.gpu(settings()), "note", *named, "leaves it unused")
    check(machine.gpu(settings(**ON_CUDA)), "problem", *named)
    if built:
        gpus.monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        check(machine.gpu(settings(**ON_CUDA)), "problem", "CUDA_VISIBLE_DEVICES is ''", "unset CUDA_VISIBLE_DEVICES")


def test_a_gpu(gpus: Gpus) -> None:
    gpus.driver("NVIDIA H100, 550.54.15")
    gpus.pytorch(1)
    found = ["NVIDIA H100 (80 GiB, compute capability 9.0)", "CUDA 12.8", "driver 550.54.15"]
    check(machine.gpu(settings(**ON_CUDA)), "ok", *found)
    check(machine.gpu(settings()), "note", *found, "set device: cuda")
    check(found_by("gpu", settings(device="cuda:1")), "problem", "must be below cuda:1", "change the setting")
    gpus.pytorch(1, (7, 5))
    check(found_by("gpu", settings(**ON_CUDA)), "problem", "has 7.5", "set dtype: float16")
    gpus.pytorch(1, (7, 0))
    old = settings(device="cuda", dtype="float32")
    check(machine.gpu(old), "problem", "no kernels for 7.0", "install a build that has them")


@pytest.mark.parametrize(
    ("capability", "architectures", "built"),
    [
        ((9, 0), ["sm_90"], True),
        ((9, 0), ["sm_90a"], True),
        ((8, 6), ["sm_80"], True),
        ((8, 0), ["sm_86"], False),
        ((12, 0), ["sm_90", "sm_120"], True),
        ((12, 0), ["sm_90"], False),
        ((12, 0), ["sm_90", "compute_90"], True),
        ((8, 0), ["compute_90"], False),
        ((9, 0), [], False),
    ],
)
def test_which_builds_have_kernels(capability: tuple[int, int], architectures: list[str], built: bool) -> None:
    assert machine.built_for(*capability, architectures) is built


def test_shared_memory(tmp_path: Path) -> None:
    full = Path("/proc")  # a file system without any room
    check(machine.shared_memory(settings(), full), "note", "0.0 GiB free", "--shm-size=", "emptyDir")
    check(machine.shared_memory(settings(placement__colocate="all"), full), "ok")
    check(machine.shared_memory(settings(), tmp_path / "missing"), "note", "there is no")


def test_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    check(machine.disk(settings()), "ok", f"free in {tmp_path}")
    in_memory = settings(target__offload="disk", target__offload_path="/dev/shm")
    check(machine.disk(in_memory), "note", "/dev/shm (tmpfs)", "set target.offload_path")
    missing = settings(target__offload="disk", target__offload_path=str(tmp_path / "missing"))
    check(found_by("memory", missing), "problem", "must be a directory that can be written to")
    check(found_by("disk", missing), "problem", "FileNotFoundError")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=100 * MIB, free=4 * MIB))
    check(machine.disk(settings()), "note", "95% are taken", "delete", str(tmp_path / "ray"))


@pytest.mark.parametrize(("soft", "hard", "status"), [(256, 1024, "note"), (256, 9000, "ok"), (1024, 1024, "note")])
def test_open_files(soft: int, hard: int, status: str) -> None:
    """The limit is really set, in another process. Ray raises the soft limit as far as the hard limit allows."""
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from dataclasses import astuple
from deploy.doctor.machine import open_files
from triforce_core.config import Settings
print(*astuple(open_files(Settings())), sep="|")
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPOSITORY, check=True)
    finding = Finding(*(Status(part) if not at else part for at, part in enumerate(result.stdout.strip().split("|"))))
    check(finding, status, f"at most {hard}", *(["ulimit -Hn 65536", "nofile"] if status == "note" else []))


# -- software ----------------------------------------------------------------------------------------------------------


def test_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check(software.packages(settings()), "ok", "torch 2.", "transformers 5.", "ray 2.")
    needs = ["torch<2", "transformers>=5", "no-such-package>=1; extra == 'server'"]
    needs += ["no-such-option; extra == 'gpu'", "pytest<1; extra == 'dev'"]
    folder = tmp_path / "triforce_serve-9.dist-info"
    folder.mkdir()
    header = "Metadata-Version: 2.1\nName: triforce-serve\nVersion: 9\n"
    (folder / "METADATA").write_text(header + "".join(f"Requires-Dist: {need}\n" for need in needs))
    monkeypatch.syspath_prepend(str(tmp_path))
    finding = software.packages(settings())
    check(finding, "problem", f"torch {torch.__version__} is not <2", "no-such-package is missing", "pip install")
    for fine in ("transformers", "no-such-option", "pytest"):
        assert fine not in finding.found


WAITING = [sys.executable, "-c", "input()"]


def test_a_haproxy_that_a_killed_ray_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_SERVE_HAPROXY_CONFIG_FILE_LOC", str(tmp_path / "haproxy.cfg"))
    config = str(tmp_path / "of-a-node" / "haproxy.cfg")
    check(software.ray(settings()), "ok", "2.")
    with subprocess.Popen([*WAITING, "-f", config], stdin=subprocess.PIPE) as left:
        check(software.ray(settings()), "problem", "HAProxy is left", f"kill {left.pid};")
        left.kill()
    starts = f"import subprocess, sys; subprocess.run({[*WAITING, '-f', config]!r}, stdin=0)"
    actor = ["ray::ProxyActor", "-c", starts]
    with subprocess.Popen(actor, executable=sys.executable, stdin=subprocess.PIPE) as owner:
        while not (children := machine.psutil.Process(owner.pid).children()) or config not in children[0].cmdline():
            assert owner.poll() is None
        check(software.ray(settings()), "ok")
        owner.communicate(b"\n")


def test_haproxy_s_own_ports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_SERVE_HAPROXY_CONFIG_FILE_LOC", str(tmp_path / "haproxy.cfg"))
    with taken_port("0.0.0.0") as taken:
        monkeypatch.setenv("RAY_SERVE_HAPROXY_STATS_PORT", str(taken))
        check(software.ray(settings()), "ok")
        monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
        named = [f"HAProxy's port {taken} is taken", f"(pid {os.getpid()})", "set RAY_SERVE_HAPROXY_STATS_PORT"]
        check(software.ray(settings()), "problem", *named)


def test_ports() -> None:
    with taken_port("0.0.0.0") as taken:
        with taken_port() as free:
            pass
        mine = f"(pid {os.getpid()})"
        http = software.ports(settings(server__port=taken, server__grpc_port=free))
        check(http, "problem", f"server.port: {taken} must be free", mine, "set server.port (--port)")
        grpc = software.ports(settings(server__port=free, server__grpc_port=taken))
        check(grpc, "problem", f"server.grpc_port: {taken} must be free", mine, "set server.grpc_port to")
        same = software.ports(settings(server__port=free, server__grpc_port=free))
        check(same, "problem", "must not be server.port", "set server.grpc_port to")
        elsewhere = software.ports(settings(server__host="nowhere.invalid", server__port=free))
        check(elsewhere, "problem", "is no address of this machine", "0.0.0.0")


# -- models ------------------------------------------------------------------------------------------------------------


def test_models(tmp_path: Path) -> None:
    check(found_by("models", settings()), "ok", "vocabulary of 4096", "16384", "32768", "drafter demo")
    check(found_by("models", settings(target__model="/nowhere")), "problem", "target: '/nowhere'", "config.json")
    small = str(tmp_path / "small")
    random_model().save_pretrained(small)
    other = found_by("models", settings(draft__model=small))
    check(other, "problem", "has 256 tokens: must have the target's 4096", "set draft.model: ngram")
    tight = found_by("models", settings(target__kv_pool_tokens=1000))
    check(tight, "note", "less than one context", "raise target.kv_pool_tokens to 16384")


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
    check(serving.weights(given), "ok", f"drafter {copied}: 1.4M parameters", "target demo: 9.4M")
    damage(copied / "model.safetensors")
    check(serving.weights(given), "problem", f"drafter {copied} has no weights", "copy its *.safetensors files again")


def test_weights_in_shards(tmp_path: Path) -> None:
    index = {"metadata": {}, "weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"}}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "1.safetensors")
    with pytest.raises(FileNotFoundError):
        serving.parameters(str(tmp_path), "target")
    save_file({"b": torch.zeros(4), "c": torch.zeros(5)}, tmp_path / "2.safetensors")
    assert serving.parameters(str(tmp_path), "target") == 2 * 3 + 4 + 5


def test_weights_to_download() -> None:
    named = ["drafter nobody/nothing: not downloaded yet", "hf download nobody/nothing"]
    check(serving.weights(settings(draft__model="nobody/nothing")), "note", *named)


def test_sizes_are_those_of_the_tiers() -> None:
    """What the check adds up is what the tiers allocate, but for the one slot more of each pool."""
    given = settings(max_sequences=2, target__kv_pool_tokens=3000)
    target, drafter = (load_model("demo", role, "float32", "cpu") for role in ("target", "drafter"))
    for model, role in ((target, "target"), (drafter, "drafter")):
        assert serving.parameters("demo", role) == sum(weight.numel() for weight in model.parameters())
    runner = draft_proposer(drafter, given).runner
    assert runner is not None
    for tier, role, kv in (
        ("target", "target", full_kv(target, given)),
        ("retrieval", "target", retrieval_kv(target, given)),
        ("draft", "drafter", runner.kv),
    ):
        allocated = sum(keys.nbytes + values.nbytes for keys, values in zip(kv.keys, kv.values, strict=True))
        assert room.kv_bytes(given, tier, "demo", role) == pytest.approx(allocated, rel=5e-3)


def test_processes_take_the_sum_of_their_tiers() -> None:
    def bytes_of(**given: Any) -> list[int]:
        each = settings(**given)
        return [room.process_bytes(each, group) for group in each.placement.groups]

    weights = 4 * (serving.parameters("demo", "target") or 0)
    apart, together = bytes_of(), bytes_of(placement__colocate="all")
    assert together == [sum(apart) - weights], "target and retrieval tier share weights"
    own = bytes_of(placement__colocate="all", retrieval__quantization="int8")
    assert own == [sum(apart)], "quantised weights are a copy"
    halves = bytes_of(target__tensor_parallel=2)
    assert halves == [apart[0] // 2, apart[1] // 2, apart[2]], "a rank has half of weights and KV"
    [with_offload, *_] = bytes_of(target__offload="host")
    layers, pool = 4, 4 * 16384 * 2 * 8 * 64
    kept = weights + (2 + layers) * pool + layers * pool // 16
    assert with_offload == kept, "two staged layers; and all of them in host memory, with a mean key of each chunk"


def test_what_one_gpu_must_hold() -> None:
    def most(*gpus: float, copies: int = 1) -> int:
        needs = [(DeviceGroup(("draft",), 0, n, {}, None), 10**at) for at, n in enumerate(gpus)]
        return room.on_one_gpu(needs, copies)

    assert most(0, 0, 0) == 111
    assert most(0, 0, 0, copies=2) == 222
    assert most(1, 1, 1, copies=2) == 100
    assert most(0.5, 0.5, 1) == 100
    assert most(1, 0.5, 0.5) == 110


@pytest.mark.parametrize(
    ("limit_mib", "status", "named"),
    [
        (200, "problem", ["takes 0.25 GiB", "lower it, or set target.offload: disk"]),
        (300, "problem", ["takes 0.25 GiB", "GiB for snapshots and passes", "lower it"]),
        (1000, "note", ["by the limit of this container", "the kernel may end processes", "or free memory"]),
        (8000, "ok", ["7.81 GiB free"]),
    ],
)
def test_memory_of_a_container(
    limit_mib: int, status: str, named: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tmp_path / "sys/fs/cgroup"
    for folder in (group, tmp_path / "proc/self"):
        folder.mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    for file, text in (("memory.max", limit_mib * MIB), ("memory.current", 0), ("memory.stat", "anon 0")):
        (group / file).write_text(f"{text}\n")
    limited = container.container_free(tmp_path)
    for module in (container, kv_memory):
        monkeypatch.setattr(module, "container_free", lambda: limited)
    check(found_by("memory", settings(dtype="bfloat16")), status, *named)


def test_placement(gpus: Gpus) -> None:
    check(serving.placement(settings()), "ok", "3 processes", "target; retrieval; draft")
    three = settings(placement={tier: {"gpus": 1} for tier in ("target", "retrieval", "draft")}, **ON_CUDA)
    check(serving.placement(three), "problem", "with 0 GPUs", "no node has", "placement.<tier>.gpus")
    gpus.pytorch(3)
    check(serving.placement(three), "ok", "target (1 GPU a rank)")
    check(serving.placement(settings(**ON_CUDA)), "note", "share the first of 3 GPUs", "reserve a GPU for each tier")
    gpus.pytorch(2)
    check(serving.placement(three), "problem", "with 2 GPUs", "PACK cannot lay out")
    apart = settings(placement={"strategy": "STRICT_SPREAD"})
    check(serving.placement(apart), "problem", "STRICT_SPREAD cannot lay out", "placement.strategy")
    labelled = settings(placement__draft={"labels": {"zone": "a"}})
    check(serving.placement(labelled), "note", "zone: a", "ray list nodes")
