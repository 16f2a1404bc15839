"""The largest requests that a pipeline serves, from its settings and the target's configuration, without weights."""

from dataclasses import dataclass

from transformers.configuration_utils import PretrainedConfig

from triforce_core.config import REMOVED_SELECTORS, SELECTOR_NAMES, Settings
from triforce_core.engine.sequence import Request
from triforce_core.errors import ContextLengthError, require
from triforce_core.models.files import context_length, kv_shape, windows

MAX_STOP_TOKENS = 256  # every tier looks for them at every position
MAX_LOGPROBS = 20  # alternatives per token, as in OpenAI's chat completions
MAX_PRIORITY = 100  # the latest served; the earliest served is -100


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest requests that a pipeline serves, however busy it is."""

    context_length: int  # tokens of prompt and output together
    kv_pool_tokens: int
    vocab_size: int
    eviction: str = "none"  # unless "none", requests of any length take the same memory, and none speculates

    def check(self, request: Request) -> None:
        """Raise `InvalidValueError` or `ContextLengthError` for a request that can never be served."""
        require(len(request.prompt) > 0, "prompt", "", "must hold at least one token")
        require(request.max_tokens >= 1, "max_tokens", request.max_tokens, "must be at least 1")
        num_resumed = len(request.resume)
        require(num_resumed <= request.max_tokens, "resume_token_ids", num_resumed, "must be at most max_tokens")
        require(-(2**63) <= request.seed < 2**63, "seed", request.seed, "must be at least -2**63 and below 2**63")
        rule = f"must be at least {-MAX_PRIORITY} and at most {MAX_PRIORITY}"
        require(-MAX_PRIORITY <= request.priority <= MAX_PRIORITY, "priority", request.priority, rule)
        check_selector("selector", request.selector)
        in_time = request.timeout_s is None or request.timeout_s > 0
        require(in_time, "timeout_s", request.timeout_s, "must be above 0")
        length = len(request.prompt) + request.max_tokens
        counts = f"{len(request.prompt)} prompt + {request.max_tokens} output tokens"
        if length > self.context_length:
            raise ContextLengthError("prompt", counts, f"must fit the context of {self.context_length} tokens")
        if length > self.kv_pool_tokens and self.eviction == "none":
            raise ContextLengthError("prompt", counts, f"must fit the KV pool of {self.kv_pool_tokens} tokens")
        rule = f"must be (0, 0): target.eviction is {self.eviction}, and a target that forgets does not speculate"
        speculates = any(request.lookaheads or ())
        require(self.eviction == "none" or not speculates, "lookaheads", request.lookaheads, rule)
        self.check_tokens("prompt", request.prompt)  # last: their number is bounded by now
        self.check_tokens("resume_token_ids", request.resume)
        count, rule = len(request.stop_token_ids), f"must be at most {MAX_STOP_TOKENS} tokens"
        require(count <= MAX_STOP_TOKENS, "stop_token_ids", count, rule)
        self.check_tokens("stop_token_ids", request.stop_token_ids)
        self.check_tokens("logit_bias", tuple(token for token, _ in request.sampling.logit_bias))
        self.check_tokens("bad_words", tuple(token for word in request.sampling.bad_word_ids for token in word))
        minimum, rule = request.sampling.min_tokens, f"must be at most max_tokens, {request.max_tokens}"
        require(minimum <= request.max_tokens, "min_tokens", minimum, rule)
        for name, number in (("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs)):
            most = min(MAX_LOGPROBS, self.vocab_size)
            require(number is None or 0 <= number <= most, name, number, f"must be between 0 and {most}")

    def longest_output(self, prompt_tokens: int) -> int:
        """The most output tokens that fit after the prompt; 1 where none fit, which `check` then refuses."""
        longest = min(self.context_length, self.kv_pool_tokens) if self.eviction == "none" else self.context_length
        return max(1, longest - prompt_tokens)

    def check_tokens(self, field: str, tokens: tuple[int, ...]) -> None:
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            wrong = next(token for token in tokens if not 0 <= token < self.vocab_size)
            require(False, field, wrong, f"is not a token id: must be at least 0 and below {self.vocab_size}")


def check_selector(field: str, selector: str | None) -> None:
    rule = f"must be one of {', '.join(SELECTOR_NAMES)}"
    if selector in REMOVED_SELECTORS:
        rule = f"was removed: use {REMOVED_SELECTORS[selector]}"
    require(selector is None or selector in SELECTOR_NAMES, field, selector, rule)


def target_limits(config: PretrainedConfig, settings: Settings) -> Limits:
    """The limits of a target with this configuration. Raises `InvalidValueError`."""
    allowed = context_length(config)
    context = settings.target.context_length or allowed
    require(context <= allowed, "target.context_length", context, f"must be at most the model's {allowed} positions")
    layers, resident = kv_shape(config)[0], settings.target.resident_layers
    require(resident <= layers, "target.resident_layers", resident, f"must be at most the model's {layers} layers")
    size, _ = windows(config)
    rule = f"must be none: the model has sliding windows of {size} tokens, which are not combined with eviction"
    require(not size or settings.target.eviction == "none", "target.eviction", settings.target.eviction, rule)
    pool = settings.target.kv_pool_tokens or context  # at least; without the setting the target measures its room
    return Limits(context, pool, config.vocab_size, settings.target.eviction)
