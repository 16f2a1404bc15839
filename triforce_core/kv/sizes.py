"""The sizes in tokens, by the settings, of the caches whose memory is fixed: of the two drafting tiers, and of a target
that evicts KV. The size of other targets' caches is in building/target_kv.py.
"""

from triforce_core.config import MAX_LOOKAHEAD, Settings
from triforce_core.kv.heavy_hitter import HeavyHitterSettings
from triforce_core.kv.streaming import WindowSettings

MAX_BLOCK = 2 * MAX_LOOKAHEAD + 2  # tokens: the longest block, the token before it, and one to spare


def draft_window(settings: Settings) -> WindowSettings:
    """The draft tier's window; its capacity is the number of tokens of each sequence."""
    return WindowSettings(window=settings.draft.window, slack=settings.draft.slack)


def draft_heavy_hitters(settings: Settings) -> HeavyHitterSettings:
    """The draft tier's cache with `draft.cache: heavy_hitter`: as many tokens as sinks and window, half of them heavy
    hitters. The tier above may still take back `lag` tokens; if it takes back more, the whole text is forwarded again.
    """
    window = draft_window(settings)
    budget = window.sinks + window.window
    lag, drafts = MAX_LOOKAHEAD + 2, 2 * MAX_LOOKAHEAD  # without the retrieval tier, a plan adds both lookaheads
    return HeavyHitterSettings(budget, budget // 2, window.slack, lag, drafts)


def target_heavy_hitters(settings: Settings) -> HeavyHitterSettings:
    """The cache of a target with `eviction: heavy_hitter`."""
    budget = settings.target.kept_tokens
    return HeavyHitterSettings(budget, round(budget * settings.target.heavy_share), budget // 4)


def target_window(settings: Settings) -> WindowSettings:
    """The window of a target with `eviction: streaming`."""
    budget, sinks = settings.target.kept_tokens, 4
    return WindowSettings(sinks, budget - sinks, budget // 4)


def retrieval_tail(settings: Settings) -> int:
    """The tokens of each sequence in the retrieval tier beside its snapshot: those decoded until the next arrives, and
    those of a tree.
    """
    return 2 * settings.retrieval.refresh_every + MAX_BLOCK + settings.speculation.nodes
