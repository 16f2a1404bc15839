"""What happens where this machine cannot run an optimisation. With `auto`, the default, passes run without it, and the
log says so. A setting that asks for the optimisation explicitly is refused.
"""

import logging
from functools import cache

import torch

from triforce_core.config import Settings
from triforce_core.errors import InvalidValueError, reason_of

# The remedy for any allocation that fails, because the tiers of a process share its memory.
LOWER = "lower target.kv_pool_tokens, retrieval.budget or max_sequences"

log = logging.getLogger(__name__)


def fall_back(setting: str, mode: str, lost: str, why: str, remedy: str) -> None:
    """With `auto` log what is lost and why, else raise `InvalidValueError`; `why` continues `setting: mode`."""
    if mode != "auto":
        raise InvalidValueError(setting, mode, f"{why}: {remedy}") from None
    say(f"{setting}: auto: {lost}, so passes are slower, because {setting} {why}; to start without this: {remedy}")


def ignored(setting: str, mode: str, why: str) -> None:
    """Log that a setting has no effect here, if it asks for the optimisation explicitly."""
    if mode in ("on", "eager"):
        say(f"{setting}: {mode} does nothing here: {why}")


@cache
def say(message: str) -> None:
    """Log a warning once per process, not once per model."""
    log.warning("%s", message)


def out_of_memory(error: BaseException) -> bool:
    """Whether the error means that memory of the device or the host ran out, in whatever library it was raised."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = str(error).lower()
    return "out of memory" in said or "allocate memory" in said


def shortage(settings: Settings, error: BaseException) -> str:
    """The shortage of memory that `out_of_memory` recognised, as the rest of a message to the user."""
    return f"takes more memory than {settings.device} has ({reason_of(error)})"
