"""The sizes in tokens of the two drafting tiers' caches, by the settings; that of the target's is in limits.py."""

from __future__ import annotations

from triforce_core.config import MAX_LOOKAHEAD, Settings
from triforce_core.kv.streaming import WindowSettings

MAX_BLOCK = 2 * MAX_LOOKAHEAD + 2  # tokens: the longest block, 2 * MAX_LOOKAHEAD, and one token on either side


def draft_window(settings: Settings) -> WindowSettings:
    """The draft tier's window; its capacity is the number of tokens of each sequence."""
    return WindowSettings(window=settings.draft.window, slack=settings.draft.slack)


def retrieval_tail(settings: Settings) -> int:
    """The tokens of each sequence in the retrieval tier beside its snapshot: those decoded until the next arrives."""
    return 2 * settings.retrieval.refresh_every + MAX_BLOCK
