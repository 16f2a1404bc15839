"""When a request that has failed is sent again: in another call of a client, or to another engine of the server."""

import random

FIRST_DELAY_S = 0.25
# After so many new tokens, earlier failures no longer count. With 1, a request that kills the engine at every token
# would be repeated for each token of its output.
PROVEN_TOKENS = 16


def delay_s(failures: int, longest_s: float) -> float:
    """Seconds to wait after so many failures in a row, at least one.

    The delay doubles with each failure, up to `longest_s`. It is shortened at random, by up to half, so that requests
    that failed together are not repeated together.
    """
    return min(longest_s, FIRST_DELAY_S * 2.0 ** min(failures - 1, 16)) * random.uniform(0.5, 1)
