"""The embedded demo pair: weights of a small target and its drafter, made by triforce_core/demo_training."""

from __future__ import annotations

from pathlib import Path


def weights_dir(role: str) -> Path:
    """The folder of the embedded `target` or `drafter`."""
    return Path(__file__).with_name("weights") / role
