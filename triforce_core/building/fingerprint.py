"""A short name of what determines a target's tokens: while it is unchanged, the same request with the same seed gives
the same output on any replica; that of a target that is not exact, except for ties of rounding.
"""

import json
from hashlib import blake2b
from pathlib import Path

from transformers.utils.hub import cached_file

import triforce_core
from triforce_core.config import Settings
from triforce_core.models.files import load_config, resolve
from triforce_core.models.gguf import gguf_config
from triforce_core.models.longrope import is_long

SAMPLES, SAMPLE_BYTES = 16, 4096  # SAMPLES + 1 are read of each file of weights: whole files take minutes
WEIGHTS = ("*.safetensors", "*.bin")
DESCRIPTIONS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def target_fingerprint(settings: Settings) -> str:
    """The fingerprint of the target of these settings, by the version of this software, the settings that decide
    tokens, and the model's files as found here; that of a lossy one says so. Raises `UnknownModelError`.
    """
    target = settings.target
    what = [triforce_core.__version__, target.model, settings.dtype, settings.device_type, settings.attention]
    what.append(target.generation_config)  # what a request that is sent again leaves to the model
    if target.lossy:
        what += [target.lossy, str(target.heavy_share)]
    if is_long(load_config(target.model, "target"), target.context_length):
        what.append("long")
    digest = blake2b(json.dumps(what).encode(), digest_size=8)
    digest.update(model_digest(files_of(target.model)))
    return ("fp_lossy_" if target.lossy else "fp_") + digest.hexdigest()


def files_of(model: str) -> Path:
    """The folder of a target's files, or its GGUF file."""
    path = resolve(model, "target")
    if Path(path).exists():
        return Path(path)
    config = cached_file(path, "config.json")
    assert config is not None, "it raises where the file is missing"
    return Path(config).parent


def model_digest(files: Path) -> bytes:
    """A digest of a model's descriptions, and of each file of weights its size and samples of its bytes. Other training
    changes weights everywhere and so the samples; they miss a change of a few bytes elsewhere.
    """
    digest = blake2b(digest_size=16)
    for path in [files / name for name in DESCRIPTIONS]:
        if path.is_file():
            digest.update(path.name.encode() + blake2b(path.read_bytes()).digest())
    if files.is_file():
        digest.update(repr(gguf_config(str(files))).encode())
    found = [files] if files.is_file() else [path for pattern in WEIGHTS for path in files.glob(pattern)]
    for path in sorted(found):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for index in range(SAMPLES + 1):
                file.seek(max(0, size - SAMPLE_BYTES) * index // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()
