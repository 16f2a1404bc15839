"""uv is told pip's settings and installs what pip would; where that is not certain, pip installs.

With the real pip, and in place of uv and of the network a script and a folder of files named like wheels.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from scripts import install
from scripts.install import PIP, UvDoesNotDoError, output_of, pip_settings, torch_of_pip, torch_of_uv, uv_settings


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's settings of pip and uv do not apply."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


def test_the_environment_goes_over_the_section_and_that_over_global(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """pip itself prints settings in this order."""
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://global/simple\nfind-links = /a\n  /b\ntimeout = 60\n"
        "trusted-host = global\n"
        "[install]\nindex-url = https://install/simple\ntrusted-host = it's\n"
        "[download]\nindex-url = https://download/simple\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "180")
    monkeypatch.setenv("PIP_INDEX_URL", "https://environment/simple")
    found = pip_settings(output_of([*PIP, "config", "list"], {}))
    expected = {
        "index-url": "https://environment/simple",
        "find-links": "/a\n/b",
        "timeout": "60",
        "trusted-host": "it's",
        "default-timeout": "180",
    }
    assert expected.items() <= found.items(), "the machine's own settings may be among them"


def test_uv_is_told_where_pip_looks() -> None:
    settings = {
        "index-url": "https://here/simple",
        "extra-index-url": "\nhttps://a/simple\nhttps://b/simple",
        "find-links": "/a /b",
        "constraint": "/c.txt\n/d.txt",
        "cert": "/ca.crt",
        "default-timeout": "180",
        "disable-pip-version-check": "1",
    }
    assert uv_settings(settings) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_INDEX_URL": "https://here/simple",
        "UV_EXTRA_INDEX_URL": "https://a/simple https://b/simple",
        "UV_FIND_LINKS": "/a,/b",
        "UV_CONSTRAINT": "/c.txt /d.txt",
        "SSL_CERT_FILE": "/ca.crt",
        "UV_HTTP_TIMEOUT": "180",
    }


@pytest.mark.parametrize("name", ["no-index", "only-binary", "proxy"])
def test_a_setting_that_uv_cannot_be_told_leaves_it_to_pip(name: str) -> None:
    with pytest.raises(UvDoesNotDoError, match=f"pip's {name} cannot be passed on"):
        uv_settings({name: "1", "timeout": "60"})


def offer(folder: Path, *versions: str) -> dict[str, str]:
    """Settings by which pip finds these builds of torch, and no others."""
    for version in versions:
        (folder / f"torch-{version}-py3-none-any.whl").touch()
    return {"no-index": "1", "find-links": str(folder)}


@pytest.mark.parametrize(
    ("offered", "expected"),
    [
        (["2.13.0"], "2.13.0"),
        (["2.13.0", "2.13.0+cpu", "2.14.0"], "2.13.0+cpu"),
        (["2.13.0+cpu", "2.13.0+cu130"], "2.13.0+cu130"),
        (["2.13.0.post1", "2.14.0"], "none"),
    ],
)
def test_pip_takes_the_highest_build_of_the_locked_version(tmp_path: Path, offered: list[str], expected: str) -> None:
    assert torch_of_pip("2.13.0", offer(tmp_path, *offered)) == expected


def test_an_index_without_torch_leaves_it_to_pip(tmp_path: Path) -> None:
    with pytest.raises(UvDoesNotDoError, match="No matching distribution found for torch"):
        torch_of_pip("2.13.0", offer(tmp_path))


def executable(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_uv_is_asked_with_its_variables(tmp_path: Path) -> None:
    uv = executable(tmp_path / "uv", 'read asked; echo "$asked$UV_BUILD"')
    assert torch_of_uv(uv, "2.13.0", {"UV_BUILD": "+cpu"}) == "2.13.0+cpu"


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of the calls that install. uv takes the CPU's build here, and pip is offered only CUDA's build or
    both.
    """
    log = tmp_path / "log"
    log.touch()
    executable(tmp_path / "uv", f'[ "$2" = install ] && echo "uv $*" >> {log} || echo torch==2.13.0+cpu')
    pip = executable(
        tmp_path / "pip", f'[ "$1" = install ] && echo "pip $*" >> {log} || exec {sys.executable} -m pip "$@"'
    )
    (tmp_path / "requirements.lock").write_text("torch==2.13.0\n")
    monkeypatch.setattr(install, "REPOSITORY", tmp_path)
    monkeypatch.setattr(install, "PIP", [pip])
    monkeypatch.setattr(install, "BY_PIP", [pip, "install"])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    return log


def found_in(folder: Path, *versions: str) -> str:
    (folder / "wheels").mkdir()
    offer(folder / "wheels", *versions)
    return str(folder / "wheels")


def test_uv_installs_what_pip_would(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", found_in(calls.parent, "2.13.0+cpu"))
    monkeypatch.setenv("PIP_INDEX_URL", f"file://{calls.parent}/none")
    install.main()
    lock, project = calls.read_text().splitlines()
    assert lock.startswith("uv pip install")
    assert lock.endswith("--requirement requirements.lock")
    assert project.startswith("uv pip install")
    assert project.endswith("--no-deps --no-build-isolation --editable . --editable ./demo_weights --editable ./tools")


@pytest.mark.parametrize(
    ("offered", "settings", "script", "reason"),
    [
        ("2.13.0+cu130", {}, "", "it would take torch 2.13.0+cpu, pip 2.13.0+cu130"),
        ("2.13.0+cpu", {"PIP_NO_BINARY": ":none:"}, "", "pip's no-binary cannot be passed on"),
        ("2.13.0+cpu", {}, "echo it crashed >&2; exit 1", "uv: it crashed"),
    ],
)
def test_otherwise_pip_installs_and_the_reason_is_said(
    calls: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    offered: str,
    settings: dict[str, str],
    script: str,
    reason: str,
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", found_in(calls.parent, offered))
    monkeypatch.setenv("PIP_INDEX_URL", f"file://{calls.parent}/none")
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    if script:
        executable(calls.parent / "uv", script)
    install.main()
    assert [line.split()[:2] for line in calls.read_text().splitlines()] == [["pip", "install"]] * 2
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert reason in said
