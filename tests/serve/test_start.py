"""What can be known to be wrong is said in one line before anything is started."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.app import prepare_environment, private_folder
from deploy.checks import check_models
from tests.random_models import random_model
from tests.serve.conftest import free_ports
from triforce_core.config import Settings
from triforce_core.errors import InvalidValueError, UnavailableError


def refusal(tmp_path: Path, config: str) -> str:
    """What `triforce serve` says when it refuses these settings."""
    path = tmp_path / "config.yaml"
    path.write_text(config)
    command = [sys.executable, "-m", "deploy.cli", "serve", "--config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "starting" not in done.stdout
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize("name", ["port", pytest.param("grpc_port", marks=pytest.mark.ci)])
def test_a_port_in_use(tmp_path: Path, name: str) -> None:
    [other] = free_ports(1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ports = {"port": other, "grpc_port": other, name: port}
        said = refusal(tmp_path, f"server: {{port: {ports['port']}, grpc_port: {ports['grpc_port']}}}")
    assert f"server.{name}: {port} must be free" in said
    assert "address already in use" in said


@pytest.mark.ci
def test_one_port_for_both_doors(tmp_path: Path) -> None:
    [port] = free_ports(1)
    assert "server.grpc_port" in refusal(tmp_path, f"server: {{port: {port}, grpc_port: {port}}}")


@pytest.mark.ci
def test_a_host_that_is_not_here(tmp_path: Path) -> None:
    port, grpc_port = free_ports(2)
    said = refusal(tmp_path, f"server: {{host: 192.0.2.77, port: {port}, grpc_port: {grpc_port}}}")
    assert "192.0.2.77" in said


@pytest.mark.parametrize("mode", ["disabled", "k8s", ""])
def test_a_ray_that_asks_for_no_token(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)  # once it is imported, the variables are of no use
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with pytest.raises(InvalidValueError, match=f"RAY_AUTH_MODE: '{mode}' must be token, or unset"):
        prepare_environment()


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    port, grpc_port = free_ports(2)
    said = refusal(tmp_path, f"target: {{model: {tmp_path}/none}}\nserver: {{port: {port}, grpc_port: {grpc_port}}}")
    assert "target" in said
    assert "none" in said
    assert "is not a directory with a config.json" in said


@pytest.mark.ci
def test_a_device_that_is_not_here(tmp_path: Path) -> None:
    port, grpc_port = free_ports(2)
    said = refusal(tmp_path, f"device: cuda:99\nserver: {{port: {port}, grpc_port: {grpc_port}}}")
    assert "device: 'cuda:99'" in said


def test_heads_that_flash_attention_does_not_take(tmp_path: Path) -> None:
    """The configuration tells this before any weights are loaded."""
    random_model(hidden_size=80, head_dim=20).save_pretrained(tmp_path / "odd")
    settings = Settings(target={"model": str(tmp_path / "odd")}, draft={"model": str(tmp_path / "odd")}, device="cuda")
    with pytest.raises(InvalidValueError, match=r"heads of a multiple of 8 .* have 20: set attention: blocked"):
        check_models(settings)


@pytest.mark.parametrize(("end", "stays"), [(KeyboardInterrupt(), False), (UnavailableError("no tiers"), True)])
def test_rays_files_are_in_a_folder_of_the_user_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException, stays: bool
) -> None:
    """It is removed when the server was stopped; where the server failed, its logs stay."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    found: list[Path] = []

    def fail() -> None:
        with private_folder() as folder:
            assert folder.parents[1] == tmp_path
            assert folder.parent.stat().st_mode & 0o777 == 0o700
            found.append(folder / "log")
            folder.mkdir()
            found[0].touch()
            raise end

    with pytest.raises(type(end)):
        fail()
    assert found[0].exists() == stays


@pytest.mark.slow
def test_a_placement_that_this_machine_does_not_have(tmp_path: Path) -> None:
    port, grpc_port = free_ports(2)
    path = tmp_path / "config.yaml"
    ports = f"server: {{port: {port}, grpc_port: {grpc_port}}}"
    path.write_text(f"{ports}\nplacement: {{colocate: draft_with_retrieval, draft: {{labels: {{zone: moon}}}}}}")
    command = [sys.executable, "-m", "deploy.cli", "serve", "--config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "cannot be here: no node has 0.2 CPU, zone=moon for retrieval + draft; 1 node (" in done.stderr
