"""Checkpoints that stay whole if the process is killed at any moment: each is written to a temporary file with a
checksum, then renamed. The last two are kept.
"""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import torch

from triforce_core.errors import TriForceError

_MAGIC = b"triforce-checkpoint "
KEEP = 2


class CorruptCheckpointError(TriForceError):
    """A checkpoint file whose bytes do not match its checksum."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path}: checksum does not match, the file is damaged")
        self.path = path


def save_checkpoint(folder: Path, name: str, step: int, state: dict[str, Any]) -> Path:
    """Write `state` as `{name}-{step}.ckpt` and delete all but the last two of that name."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    payload = buffer.getvalue()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{step:08d}.ckpt"
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(_MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n")
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    for old in checkpoints(folder, name)[KEEP:]:
        old.unlink()
    return path


def checkpoints(folder: Path, name: str) -> list[Path]:
    """Checkpoints of that name, newest first."""
    return sorted(folder.glob(f"{name}-*.ckpt"), reverse=True)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The state in a checkpoint, on the CPU.

    Raises:
        CorruptCheckpointError: the checksum does not match.
    """
    header, _, payload = path.read_bytes().partition(b"\n")
    if header != _MAGIC + hashlib.sha256(payload).hexdigest().encode():
        raise CorruptCheckpointError(path)
    state: dict[str, Any] = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    return state


def latest_checkpoint(folder: Path, name: str, *, refused: list[Path] | None = None) -> dict[str, Any] | None:
    """The newest checkpoint that is whole, or None; damaged ones are appended to `refused`."""
    for path in checkpoints(folder, name):
        try:
            return read_checkpoint(path)
        except CorruptCheckpointError as damage:
            if refused is not None:
                refused.append(damage.path)
    return None
