"""The embedded demo pair: the weights of a small target and of its drafter; triforce_core/demo_training makes them."""

from __future__ import annotations

from pathlib import Path


def weights_dir(role: str) -> Path:
    """The folder of the embedded `target` or `drafter`."""
    return Path(__file__).with_name("weights") / role
