"""What `dtype: auto` stands for: on one machine, by its CPU's flags; on a cluster, what all nodes do well."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from actors import precision
from actors.fit import Node
from triforce_core.config import Settings, load_settings
from triforce_core.machine.cpu import cpu_flags, cpu_name, cpu_summary
from triforce_core.models.precision import machine_dtype, resolved


def cpuinfo(folder: Path, line: str) -> Path:
    path = folder / "cpuinfo"
    path.write_text(f"processor\t: 0\nmodel name\t: bf16 in a name only\n{line}\n\nprocessor\t: 1\n{line}\n")
    return path


@pytest.mark.parametrize(
    ("line", "dtype"),
    [
        ("flags\t\t: fpu fma avx avx2 f16c", "float32"),
        ("flags\t\t: avx2 avx512f avx512_vnni avx512bw", "float32"),
        ("flags\t\t: avx512f avx512_bf16", "bfloat16"),
        ("flags\t\t: avx512f amx_bf16 amx_tile", "bfloat16"),
        ("Features\t: fp asimd bf16 i8mm", "bfloat16"),
        ("Features\t: fp asimd svebf16_not", "float32"),
    ],
)
def test_a_cpu_has_bfloat16_where_its_flags_say_so(tmp_path: Path, line: str, dtype: str) -> None:
    assert machine_dtype("cpu", cpuinfo(tmp_path, line)) == dtype
    assert machine_dtype("cuda", cpuinfo(tmp_path, line)) == "bfloat16"


def test_where_linux_does_not_tell_it_is_float32(tmp_path: Path) -> None:
    assert machine_dtype("cpu", tmp_path / "nothing") == "float32"


def test_the_flags_of_this_machine_are_found() -> None:
    assert cpu_flags() & {"avx", "asimd"}
    assert cpu_summary().startswith(cpu_name())


def test_auto_is_the_default_and_is_resolved_to_this_machine() -> None:
    assert Settings().dtype == "auto"
    assert resolved(Settings()).dtype == machine_dtype("cpu")
    assert resolved(load_settings(dtype="float16")).dtype == "float16"
    assert resolved(load_settings(device="cuda")).dtype == "bfloat16"


@pytest.fixture
def three_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two with CPUs, one without. Nodes of unlike CPUs cannot be had on one machine."""
    here = [Node({"CPU": 4.0}, {"zone": "a"}), Node({"CPU": 4.0}, {"zone": "b"}), Node({"GPU": 1.0}, {"zone": "c"})]
    monkeypatch.setattr(precision, "nodes", lambda: here)


@pytest.mark.parametrize(
    ("answers", "dtype"),
    [({"a": "bfloat16", "b": "bfloat16"}, "bfloat16"), ({"a": "bfloat16", "b": "float32"}, "float32")],
)
def test_replicas_have_what_every_node_of_a_target_computes_well_with(
    three_nodes: None, answers: dict[str, str], dtype: str
) -> None:
    def ask(suitable: Sequence[Node]) -> list[str]:
        assert {node.labels["zone"] for node in suitable} == {"a", "b"}, "where no target can be is not asked"
        return [answers[node.labels["zone"]] for node in suitable]

    assert precision.agreed(load_settings(), ask).dtype == dtype


def test_labels_choose_whom_to_ask(three_nodes: None) -> None:
    only_b = load_settings(placement={"target": {"labels": {"zone": "b"}}})
    asked: list[str] = []

    def ask(suitable: Sequence[Node]) -> list[str]:
        asked.extend(node.labels["zone"] for node in suitable)
        return ["bfloat16"]

    assert precision.agreed(only_b, ask).dtype == "bfloat16"
    assert asked == ["b"]


@pytest.mark.parametrize(
    "settings",
    [{"dtype": "float16"}, {"device": "cuda"}, {"placement": {"target": {"labels": {"zone": "moon"}}}}],
    ids=str,
)
def test_nobody_is_asked_where_the_answer_is_known_or_nobody_is_there(
    three_nodes: None, settings: dict[str, object]
) -> None:
    def ask(suitable: Sequence[Node]) -> list[str]:
        raise AssertionError("asked")

    given = load_settings(**settings)
    assert precision.agreed(given, ask).dtype == resolved(given).dtype
