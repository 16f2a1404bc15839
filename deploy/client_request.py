"""A client's request, in the form common to all APIs, and the checks of its fields that need no model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from triforce_core.config import MAX_LOOKAHEAD
from triforce_core.errors import InvalidValueError, require
from triforce_core.messages import MAX_BAD_WORDS, Drafting, SamplingParams
from triforce_core.sampling.guides import Guide

MAX_MESSAGES = 16_384  # with the parts of their contents and their tool calls
MAX_TOOLS = 128
MAX_STOP_STRINGS = 16
MAX_WORDS = MAX_BAD_WORDS // 2  # bad words of a request; each has two spellings
MAX_STOP_CHARACTERS = 1024  # per stop string; the event loop prepares each string and checks it at every character
MAX_SALT_CHARACTERS = 128
MAX_PROMPT_LOGPROBS = 1 << 22  # of an answer, alternatives included; over HTTP each takes some hundreds of bytes

DRAFTINGS = {drafting.name.lower(): drafting for drafting in Drafting}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """A client's request, in the form common to all APIs."""

    prompt: str | tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int | None  # None: bounded by the context and the KV pool only
    fits: bool = False  # of `max_tokens`, no more are asked for than the context has room for
    seed: int | None = None  # None: the service draws a seed
    stop: tuple[str, ...] = ()
    include_stop: bool = False  # the output ends after the stop string, not before it
    model: str = ""  # empty: the default model
    lookaheads: tuple[int, ...] | None = None  # None: the target decides
    resume: tuple[int, ...] = ()  # output tokens that the client already has
    timeout_s: float | None = None
    n: int = 1  # independent completions
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own
    ignore_eos: bool = False  # the model's own stop tokens do not end the output
    bad_words: tuple[str, ...] = ()
    guide: Guide | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    every_prompt_logprobs: bool = False  # prompt logprobs come with each of the `n` completions, not the first alone
    # How many logprobs an answer has for each prompt token. 0: the usual number, 1 + `prompt_logprobs`.
    prompt_scores: int = 0
    truncate_prompt_tokens: int | None = None  # only this number of the prompt's last tokens is read
    echo: bool = False  # the text begins with the prompt's
    progress: bool = False  # each part but the last says how the output was made until then
    shown: tuple[str, ...] = ()  # special tokens whose text is part of the output's
    # A key of DRAFTINGS. None: the target decides, or the model drafts where `lookaheads` are given.
    drafter: str | None = None
    selector: str | None = None  # a key of kv.selectors.SELECTORS; None: the settings'
    cache_salt: str = ""  # KV is shared with requests of the same API key and salt
    priority: int = 0  # waiting requests with a lower number are served earlier
    fingerprint: str = ""  # of the target whose output goes on here; empty: of any
    # Makes the final request, if this takes time: for example, if a chat must be rendered. It runs after the request
    # got its places, within its deadline. It leaves the number of places, the deadline and the model unchanged.
    prepare: Callable[[], Awaitable[ClientRequest]] | None = None

    @property
    def only_prompt(self) -> bool:
        """Whether only the prompt's text or logprobs are wanted. The engine draws a token all the same: left out."""
        return self.max_tokens == 0 and (self.echo or self.prompt_logprobs is not None)


def check_places(prompts: int, n: int, room: int) -> int:
    """How many places a request for `n` completions of each prompt takes. Raises `InvalidValueError`."""
    require(1 <= n <= room, "n", n, f"must be at least 1 and at most {room}")
    rule = f"must need at most {room} places, one for each prompt and each of its n"
    require(prompts * n <= room, "prompt", f"{prompts} prompts", rule)
    return prompts * n


def check_prompt_logprobs(asked: ClientRequest, prompt_tokens: int) -> None:
    """Raise `InvalidValueError` if an answer with `prompt_tokens` prompt tokens would have too many prompt logprobs."""
    if asked.prompt_logprobs is None:
        return
    answers = asked.n if asked.every_prompt_logprobs else 1
    each = asked.prompt_scores or 1 + asked.prompt_logprobs
    count = prompt_tokens * each * answers
    found = f"{prompt_tokens} prompt tokens x {each} logprobs each x {answers} choices"
    rule = f"must be at most {MAX_PROMPT_LOGPROBS} in an answer; the logprobs of an echo are among them"
    require(count <= MAX_PROMPT_LOGPROBS, "prompt_logprobs", found, rule)


def check_texts(asked: ClientRequest) -> None:
    """Raise `InvalidValueError` unless the stop strings, bad words and salt are within their bounds."""
    rule = f"must be at most {MAX_STOP_STRINGS} strings"
    require(len(asked.stop) <= MAX_STOP_STRINGS, "stop", len(asked.stop), rule)
    require(all(asked.stop), "stop", "", "must not hold an empty string")
    longest = max(map(len, asked.stop), default=0)
    rule = f"must be at most {MAX_STOP_CHARACTERS} characters in each string"
    require(longest <= MAX_STOP_CHARACTERS, "stop", longest, rule)
    require(len(asked.bad_words) <= MAX_WORDS, "bad_words", len(asked.bad_words), f"must be at most {MAX_WORDS} words")
    longest = max(map(len, asked.bad_words), default=0)
    require(
        longest <= MAX_STOP_CHARACTERS, "bad_words", longest, f"must be at most {MAX_STOP_CHARACTERS} characters each"
    )
    salt, rule = asked.cache_salt, f"must be at most {MAX_SALT_CHARACTERS} characters"
    require(len(salt) <= MAX_SALT_CHARACTERS, "cache_salt", f"{len(salt)} characters", rule)
    for field, texts in (("bad_words", asked.bad_words), ("cache_salt", (salt,))):
        for text in texts:
            check_unicode(field, text)


def check_unicode(field: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidValueError(field, text, "must be text without lone surrogates") from None


def check_drafter(field: str, drafter: str | None) -> None:
    rule = f"must be one of {', '.join(DRAFTINGS)}"
    require(drafter is None or drafter in DRAFTINGS, field, drafter, rule)


def check_lookaheads(field: str, lookaheads: Sequence[int]) -> None:
    require(len(lookaheads) == 2, field, lookaheads, "must be two numbers: of the retrieval and of the draft tier")
    bounded = all(0 <= n <= MAX_LOOKAHEAD for n in lookaheads)
    require(bounded, field, lookaheads, f"must each be at least 0 and at most {MAX_LOOKAHEAD}")
