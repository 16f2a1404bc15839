"""Compiling a grammar within limits that are the same in each process, so that all of them allow the same tokens."""

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# The library counts its steps, so no limit depends on the speed of the machine. The worst expressions that we found
# take 1 ms of CPU time for 1,000 units of fuel, and a few hundred bytes for each unit.
LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,  # until the first mask is computed
    step_lexer_fuel=50_000,  # for each mask
    max_lexer_states=50_000,  # of one output; a string of bounded length takes about one for each character
)


def compiled(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """The grammar at its beginning; in an error state if it is wrong, or too large for the limits."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    # What the first mask needs is computed here. Otherwise the decoding loop would do it, with the fuel for compiling.
    if forced := matcher.compute_ff_tokens():
        matcher.consume_tokens(forced)
    if not matcher.is_stopped():
        matcher.compute_bitmask()
    matcher.reset()
    return matcher
