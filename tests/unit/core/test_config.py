"""Settings: what is refused names the field, the value and the rule, whether it comes from a file or from a caller."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from triforce_core.config import Settings, load_settings
from triforce_core.errors import InvalidValueError

BAD: list[tuple[str, list[str]]] = [
    ("retreival: {budget: 64}", ["retreival", "budget", "Extra inputs are not permitted"]),
    ("retrieval: {buget: 64}", ["retrieval.buget", "64", "Extra inputs are not permitted"]),
    ("retrieval: {budget: 100, chunk: 32}", ["retrieval", "budget 100", "must be a multiple of chunk 32"]),
    ("retrieval: {budget: 32, chunk: 32}", ["retrieval", "budget 32", "must hold two chunks of 32"]),
    ("retrieval: {chunk: 0}", ["retrieval.chunk", "0", "greater than or equal to 1"]),
    ("retrieval: {selector: best}", ["retrieval.selector", "'best'", "mean_key"]),
    ("retrieval: {selector: [quest]}", ["retrieval.selector", "quest"]),
    ("retrieval: {selector: quest}", ["retrieval.selector", "was removed: use snapkv"]),
    ("retrieval: [1, 2]", ["retrieval", "[1, 2]", "valid dictionary"]),
    ("draft: {window: wide}", ["draft.window", "'wide'", "valid integer"]),
    ("draft: {window: 0}", ["draft.window", "0", "greater than or equal to 1"]),
    ("draft: {sinks: 2}", ["draft.sinks", "2", "Extra inputs are not permitted"]),
    ("threads: {decode: 1}", ["threads", "{'decode': 1}", "valid integer"]),
    ("placement: {cpus: -1}", ["placement.cpus", "-1", "greater than or equal to 0"]),
    ("target: {offload: nvme}", ["target.offload", "'nvme'", "'none', 'host' or 'disk'"]),
    ("target: {offload: host, resident_layers: -1}", ["target.resident_layers", "-1", "greater than or equal to 0"]),
    ("target: {resident_layers: 2}", ["target", "resident_layers 2 must be 0 where offload is none"]),
    ("target: {offload: disk}", ["target", "offload_path must name a directory where offload is disk"]),
    ("target: {offload: host, offload_path: /x}", ["target", "offload_path '/x' must be null where offload is host"]),
    ("target: {offload: host, prefill_chunk: 15}", ["target.prefill_chunk", "15", "greater than or equal to 16"]),
    ("speculation: {lookaheads: [65, 1]}", ["speculation", "(65, 1)", "between 0 and 64"]),
    ("speculation: {tiers: 'target,draft'}", ["speculation.tiers", "'target,draft'", "draft,retrieval,target"]),
    ("server: {port: 70000}", ["server.port", "70000", "less than or equal to 65535"]),
    ("server: {tier_gpus: 1}", ["server.tier_gpus", "Extra inputs are not permitted"]),
    ("server: {replicas: {min: 3, max: 2}}", ["server.replicas", "min 3 must be at most max 2"]),
    ("placement: {strategy: PILE}", ["placement.strategy", "'PILE'", "STRICT_SPREAD"]),
    ("placement: {colocate: some}", ["placement.colocate", "'some'", "draft_with_retrieval"]),
    ("placement: {draft: {gpu: 1}}", ["placement.draft.gpu", "Extra inputs are not permitted"]),
    ("placement: {draft: {gpus: 1.5}}", ["placement", "draft.gpus 1.5 must be a whole number, or at most 1"]),
    (
        "placement: {colocate: draft_with_retrieval, draft: {gpus: 0.4}, retrieval: {gpus: 0.7}}",
        ["retrieval.gpus 0.7 + draft.gpus 0.4 must be at most 1"],
    ),
    ("placement: {colocate: all, target: {gpus: 2}}", ["target.gpus 2", "must be at most 1"]),
    ("placement: {target: {labels: {zone: a b}}}", ["placement.target", "label zone must be v, !v, in(v,w)", "'a b'"]),
    (
        "placement: {colocate: all, draft: {labels: {zone: a}}, target: {labels: {zone: b}}}",
        ["labels of target + retrieval + draft must agree on zone"],
    ),
    ("placement: {cpu_latency_us: -1}", ["placement.cpu_latency_us", "-1", "greater than or equal to 0"]),
    ("placement: {cpu_latency_us: 2147483648}", ["placement.cpu_latency_us", "2147483648", "less than 2147483648"]),
    ("placement: {draft: {cores: [1, 1]}}", ["placement.draft", "cores [1, 1] must be different numbers"]),
    ("placement: {draft: {cores: [-1]}}", ["placement.draft", "cores [-1] must be different numbers from 0 on"]),
    ("placement: {draft: {cores: []}}", ["placement.draft.cores", "at least 1 item"]),
    (
        "placement: {colocate: all}\nspeculation: {micro_batches: 2}",
        ["speculation.micro_batches 2 must be 1 where placement.colocate is all"],
    ),
    ("target: {tensor_parallel: 0}", ["target.tensor_parallel", "0", "greater than or equal to 1"]),
    (
        "target: {tensor_parallel: 2}\ndevice: cuda:1",
        ["device 'cuda:1' must be cpu or cuda with tensor_parallel"],
    ),
    (
        "target: {tensor_parallel: 2}\nretrieval: {tensor_parallel: 1}\nplacement: {colocate: all}",
        ["retrieval.tensor_parallel 1 must be target.tensor_parallel 2"],
    ),
    (
        "retrieval: {tensor_parallel: 2}\nplacement: {retrieval: {gpus: 0.5}}",
        ["retrieval reserves 0.5 GPUs for each of 2 ranks: must be whole"],
    ),
    ("device: gpu", ["device", "'gpu'", "must be cpu, cuda or cuda:N"]),
    ("graphs: on", ["graphs 'on' must be auto, eager or off where device is cpu"]),
    ("compile: eager", ["compile", "'eager'", "'auto', 'on' or 'off'"]),
    ("graphs: 1", ["graphs", "'auto', 'on', 'eager' or 'off'"]),
    ("dtype: float8", ["dtype", "'float8'", "bfloat16"]),
    ("max_sequences: 0", ["max_sequences", "0", "greater than or equal to 1"]),
    ("- a list", ["config", "settings.yaml", "must be a mapping of sections"]),
    ("target: {model: [", ["config", "settings.yaml", "is not valid YAML"]),
]


@pytest.mark.parametrize(("text", "named"), BAD, ids=[text for text, _ in BAD])
def test_a_bad_file_is_refused_by_field_value_and_rule(
    text: str, named: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # what is too long is shown in part
    path = Path("settings.yaml")
    path.write_text(text)
    with pytest.raises(InvalidValueError) as refusal:
        load_settings(path)
    for part in named:
        assert part in str(refusal.value)


def missing(path: Path) -> None:
    """Leaves the file out."""


def directory(path: Path) -> None:
    path.mkdir()


def binary(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00\x01")


@pytest.mark.parametrize("make", [missing, directory, binary])
def test_an_unreadable_file(make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make(Path("settings.yaml"))
    with pytest.raises(InvalidValueError, match=r"config: 'settings\.yaml' "):
        load_settings(Path("settings.yaml"))


def test_overrides_merge_into_sections_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("retrieval: {budget: 128, chunk: 16}\ndtype: float32\ntarget:\n")
    settings = load_settings(path, retrieval={"chunk": 32}, target={"prefill_chunk": 64}, dtype="float16")
    assert (settings.retrieval.budget, settings.retrieval.chunk) == (128, 32)
    assert (settings.target.prefill_chunk, settings.dtype) == (64, "float16")
    assert settings.draft == Settings().draft


def test_overrides_are_validated_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("retrieval: {budget: 96}\ndraft: 7")
    with pytest.raises(InvalidValueError, match="budget 96 must be a multiple of chunk 64"):
        load_settings(path, retrieval={"chunk": 64}, draft={"window": 1})


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("# nothing yet\n")
    assert load_settings(path) == load_settings() == Settings()


@pytest.mark.parametrize(
    ("tiers", "effective"), [("target", (0, 0)), ("retrieval,target", (8, 0)), ("draft,retrieval,target", (8, 3))]
)
def test_tiers_that_do_not_take_part_look_ahead_by_0(tiers: str, effective: tuple[int, int]) -> None:
    assert load_settings(speculation={"tiers": tiers, "lookaheads": (8, 3)}).speculation.effective == effective


@pytest.mark.parametrize(
    ("settings", "lookaheads", "prefill_chunk"),
    [
        ({}, (8, 3), 2048),
        ({"target": {"offload": "host"}}, (16, 3), 32_768),
        ({"target": {"offload": "host"}, "speculation": {"micro_batches": 1}}, (16, 3), 32_768),
        ({"target": {"offload": "host", "prefill_chunk": 64}, "speculation": {"lookaheads": (8, 3)}}, (8, 3), 64),
        ({"target": {"offload": "disk", "offload_path": "/x"}, "speculation": {"tiers": "target"}}, (16, 3), 32_768),
    ],
    ids=str,
)
def test_an_offloaded_target_looks_further_ahead_unless_told(
    settings: dict[str, Any], lookaheads: tuple[int, int], prefill_chunk: int
) -> None:
    """The defaults of an offloaded target can be printed and read back, like other settings."""
    loaded = load_settings(**settings)
    for each in (loaded, Settings.model_validate(loaded.model_dump(mode="json"))):
        assert (each.speculation.lookaheads, each.target.prefill_chunk) == (lookaheads, prefill_chunk)
    assert loaded.speculation.effective == (lookaheads if loaded.speculation.tiers != "target" else (0, 0))


def test_the_selector_with_offload_moves_no_keys_unless_told_to() -> None:
    assert load_settings().retrieval.selector == "snapkv"
    assert load_settings(target={"offload": "host"}).retrieval.selector == "mean_key"
    told = load_settings(target={"offload": "host"}, retrieval={"selector": "snapkv"})
    assert told.retrieval.selector == "snapkv"


@pytest.mark.parametrize(("colocate", "expected"), [("none", 3), ("draft_with_retrieval", 2), ("all", 1)])
def test_there_is_a_micro_batch_for_each_process(colocate: str, expected: int) -> None:
    settings = load_settings(placement={"colocate": colocate})
    assert settings.micro_batches == len(settings.placement.groups) == expected
    assert load_settings(placement={"colocate": colocate}, speculation={"micro_batches": 1}).micro_batches == 1


@pytest.mark.parametrize(("window", "slack"), [(1, 2), (20, 12), (252, 128)])
def test_a_window_grows_by_half_of_itself(window: int, slack: int) -> None:
    assert load_settings(draft={"window": window}).draft.slack == slack


def test_a_process_reserves_what_its_tiers_do_together() -> None:
    tiers = {
        "draft": {"gpus": 0.1, "cores": [3, 1]},
        "retrieval": {"gpus": 0.2, "labels": {"zone": "a"}, "cores": [1, 0]},
        "target": {"gpus": 0.7, "labels": {"zone": "a", "disk": "!slow"}},
    }
    [every] = load_settings(placement={"colocate": "all", **tiers}).placement.groups
    assert (every.cpus, every.gpus, every.cores) == (0.3, 1.0, (0, 1, 3))
    assert every.labels == {"zone": "a", "disk": "!slow"}
    target, drafting = load_settings(placement={"colocate": "draft_with_retrieval", **tiers}).placement.groups
    assert (target.gpus, target.cores, drafting.gpus, drafting.cores) == (0.7, None, 0.3, (0, 1, 3))


@pytest.mark.parametrize(
    ("given", "controlled"),
    [
        ({}, True),
        ({"speculation": {"controller": False}}, False),
        ({"speculation": {"tiers": "target"}}, False),
        ({"deterministic": True}, False),
    ],
    ids=str,
)
def test_rounds_are_planned_where_there_is_something_to_decide(given: dict[str, Any], controlled: bool) -> None:
    assert load_settings(**given).controlled is controlled
