"""What makes passes faster and cannot be had: told in the log where it is a default, refused where it was asked for."""

from __future__ import annotations

import logging
from functools import cache

import torch

from triforce_core.config import Settings
from triforce_core.errors import InvalidValueError

# Whatever was to be allocated: the tiers of a process share its memory.
LOWER = "lower target.kv_pool_tokens, retrieval.budget or max_sequences"

log = logging.getLogger(__name__)


def fall_back(setting: str, mode: str, lost: str, why: str, remedy: str) -> None:
    """With auto say what is lost, and why; else raise `InvalidValueError`. `why` follows upon the setting's value."""
    if mode != "auto":
        raise InvalidValueError(setting, mode, f"{why}: {remedy}") from None
    say(f"{setting}: auto: {lost}, for it {why}: passes are slower; {remedy}")


def ignored(setting: str, mode: str, why: str) -> None:
    """Say that a setting does nothing for a tier, or a part of one, if it was set."""
    if mode in ("on", "eager"):
        say(f"{setting}: {mode} does nothing here: {why}")


@cache
def say(message: str) -> None:
    """Once, not for every model."""
    log.warning("%s", message)


def out_of_memory(error: BaseException) -> bool:
    """Of a device, or of the host; also where a compiler or a graph was the one to ask for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = str(error).lower()
    return "out of memory" in said or "allocate memory" in said


def shortage(settings: Settings, error: BaseException) -> str:
    """For people, what `out_of_memory` found."""
    return f"takes more memory than {settings.device} has ({reason_of(error)})"


def reason_of(error: BaseException) -> str:
    """Its first line."""
    return (str(error) or repr(error)).strip().split("\n")[0]
