"""The fingerprint: what it covers, and what leaves it alone."""

from __future__ import annotations

from pathlib import Path

from triforce_core.building.fingerprint import SAMPLE_BYTES, model_digest, target_fingerprint
from triforce_core.config import load_settings


def test_settings_that_decide_tokens_change_it_and_others_do_not() -> None:
    here = target_fingerprint(load_settings(dtype="float32"))
    assert here.startswith("fp_")
    assert here == target_fingerprint(load_settings(dtype="float32", max_sequences=3, retrieval={"budget": 512}))
    first, second = (target_fingerprint(load_settings(device=device)) for device in ("cuda:0", "cuda:1"))
    assert first == second, "which of several GPUs holds the target changes no token"
    lossy = target_fingerprint(load_settings(dtype="float32", target={"eviction": "streaming"}))
    others = {here, lossy, target_fingerprint(load_settings(dtype="bfloat16")), first}
    assert len(others) == 4
    assert lossy.startswith("fp_lossy_")


def test_other_weights_are_another_model(tmp_path: Path) -> None:
    weights = bytearray(range(256)) * 4096  # a megabyte
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(weights)
    digests = {model_digest(tmp_path)}
    assert digests == {model_digest(tmp_path)}
    for change in (0, SAMPLE_BYTES - 1, len(weights) - 1):
        (tmp_path / "model.safetensors").write_bytes(
            bytes(weights[:change]) + bytes([weights[change] ^ 1]) + bytes(weights[change + 1 :])
        )
        digests.add(model_digest(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(weights[:-1])
    digests.add(model_digest(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(weights)
    (tmp_path / "config.json").write_text('{"rope_theta": 1}')
    digests.add(model_digest(tmp_path))
    assert len(digests) == 6
