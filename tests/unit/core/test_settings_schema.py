"""`triforce config --schema` accepts what settings files may hold, and refuses by the key's name what they may not."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.command_line import run
from triforce_core.config import Settings


@pytest.fixture
def schema(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Draft202012Validator:
    assert run(monkeypatch, "config", "--schema") == 0
    printed = json.loads(capsys.readouterr().out)
    Draft202012Validator.check_schema(printed)
    return Draft202012Validator(printed)


def refusals_of(schema: Draft202012Validator, data: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in schema.iter_errors(data)]


def test_it_accepts_what_config_prints(
    schema: Draft202012Validator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "config") == 0
    assert refusals_of(schema, yaml.safe_load(capsys.readouterr().out)) == []


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "target: {max_stall_ms: off}",
        "target: {max_stall_ms: 'off'}",
        "target: {max_stall_ms: null}",
        "target: {offload: disk, offload_path: /kv, resident_layers: 2, served_name: mine}",
        "graphs: off\ncompile: on",
        "speculation: {lookaheads: [64, 0], tiers: 'retrieval,target'}",
        "device: cuda:1\nplacement: {draft: {cores: [0, 1], labels: {zone: '!a'}, gpus: 0.5}}",
    ],
)
def test_it_accepts_every_form_that_settings_accept(schema: Draft202012Validator, text: str) -> None:
    data = yaml.safe_load(text)
    Settings.model_validate(data)
    assert refusals_of(schema, data) == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("retreival: {budget: 64}", "'retreival' was unexpected"),
        ("retrieval: {buget: 64}", "$.retrieval: .*'buget' was unexpected"),
        ("server: {replicas: {most: 2}}", "$.server.replicas: .*'most' was unexpected"),
        ("placement: {draft: {gpu: 1}}", "$.placement.draft: .*'gpu' was unexpected"),
        ("server: {port: 70000}", "$.server.port: 70000"),
        ("target: {offload: nvme}", "$.target.offload: 'nvme'"),
        ("target: {max_stall_ms: on}", "$.target.max_stall_ms: True"),
        ("target: {max_stall_ms: 0}", "$.target.max_stall_ms: 0"),
        ("speculation: {lookaheads: [65, 1]}", "$.speculation.lookaheads[0]: 65"),
        ("speculation: {lookaheads: [1]}", "$.speculation.lookaheads: [1]"),
        ("device: gpu", "$.device: 'gpu'"),
        ("compile: eager", "$.compile: 'eager'"),
        ("max_sequences: many", "$.max_sequences: 'many'"),
    ],
)
def test_it_refuses_by_name_what_settings_refuse(schema: Draft202012Validator, text: str, named: str) -> None:
    data = yaml.safe_load(text)
    with pytest.raises(ValueError, match="validation error"):
        Settings.model_validate(data)
    [refusal] = refusals_of(schema, data)
    for part in named.split(".*"):
        assert part in refusal
