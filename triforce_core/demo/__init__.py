"""The embedded demo pair: how its corpus, its two models, its figures and its card are made."""

from __future__ import annotations

from pathlib import Path


def weights_dir(role: str) -> Path:
    """The folder of the embedded `target` or `drafter`."""
    return Path(__file__).with_name("weights") / role
