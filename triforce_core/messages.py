"""The messages between tiers. Positions in them are absolute, so repeating a message is harmless.

A `Span` states the tokens of a sequence from some position on, `Work` asks a tier to continue the sequence, and a
`Proposal` is the answer. docs/architecture.md shows how the messages are used;
docs/decisions/0001-protocol-additions.md explains why `snapshot_wanted` and `tallies` exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple, Protocol

from triforce_core.errors import require


class Tier(IntEnum):
    """A tier of a pipeline."""

    DRAFT = 0
    RETRIEVAL = 1
    TARGET = 2


class Origin(IntEnum):
    """Where a token comes from: the lowest tier that drew it, or prompt lookup; on the wire, too."""

    DRAFT = 0
    RETRIEVAL = 1
    TARGET = 2
    LOOKUP = 3


class Drafting(IntEnum):
    """How the lowest tier drafts. These values are used on the wire. A `Leaf` without a model always looks up."""

    MODEL = 0  # its model drafts
    LOOKUP = 1  # prompt lookup drafts; where it finds nothing, nothing is drafted
    BOTH = 2  # prompt lookup drafts; where it finds nothing, the model does


FIRST_COMPARED = 64  # tokens compared at first in `agreement`; twice as many each time that they are equal
MAX_BIASED_TOKENS = 1024  # more would make every message between tiers long
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 64  # per word


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What is done to the model's logits before a token is drawn; the defaults leave them unchanged.

    The order: penalties, bias, exclusions (sampling/edits.py); temperature, top-k, top-p, min-p (sampling/warp.py).
    """

    temperature: float = 1.0  # 0 is greedy; smaller values than 1e-4 count as 0
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # of tokens in prompt or output: divides positive logits, multiplies negative ones
    presence_penalty: float = 0.0  # subtracted from the logit of each token in the output
    frequency_penalty: float = 0.0  # the same, times the number of its occurrences in the output
    min_tokens: int = 0  # stop tokens are excluded until the output has so many tokens
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # runs of tokens that never occur in the output

    def __post_init__(self) -> None:
        require(0 <= self.temperature <= 100, "temperature", self.temperature, "must be between 0 and 100")
        if self.temperature < 1e-4:  # logits divided by a smaller value would overflow
            object.__setattr__(self, "temperature", 0.0)
        require(0 <= self.top_k < 2**31, "top_k", self.top_k, "must be 0 (off) or more, and below 2**31")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "must be above 0 and at most 1")
        require(0 <= self.min_p <= 1, "min_p", self.min_p, "must be between 0 and 1")
        rule = "must be at least 0.01 and at most 100"
        require(0.01 <= self.repetition_penalty <= 100, "repetition_penalty", self.repetition_penalty, rule)
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            require(-2 <= value <= 2, name, value, "must be between -2 and 2")
        require(0 <= self.min_tokens < 2**31, "min_tokens", self.min_tokens, "must be 0 or more, and below 2**31")
        count, rule = len(self.logit_bias), f"must hold at most {MAX_BIASED_TOKENS} tokens"
        require(count <= MAX_BIASED_TOKENS, "logit_bias", f"{count} tokens", rule)
        object.__setattr__(self, "logit_bias", tuple(sorted(self.logit_bias)))
        distinct = len(dict(self.logit_bias)) == count
        require(distinct, "logit_bias", f"{count} tokens", "must name each token once")
        for token, bias in self.logit_bias:
            require(-100 <= bias <= 100, "logit_bias", f"{token}: {bias}", "must be between -100 and 100")
        count, rule = len(self.bad_word_ids), f"must hold at most {MAX_BAD_WORDS} words"
        require(count <= MAX_BAD_WORDS, "bad_words", f"{count} words", rule)
        longest, rule = (
            max(map(len, self.bad_word_ids), default=1),
            f"must be at most {MAX_BAD_WORD_TOKENS} tokens each",
        )
        require(longest <= MAX_BAD_WORD_TOKENS, "bad_words", f"{longest} tokens", rule)
        require(all(self.bad_word_ids), "bad_words", "", "must not hold a word without tokens")

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p may exclude tokens."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)

    @property
    def penalises(self) -> bool:
        """Whether logits depend on the tokens of the text."""
        return self.repetition_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty)


UNCHANGED = SamplingParams()
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """What a tier must know of a request to draw its tokens. It never changes during the life of the sequence."""

    sampling: SamplingParams
    seed: int  # -2**63 ≤ seed < 2**63
    prompt_length: int  # tokens
    max_length: int  # tokens of prompt and output together; no tier drafts or decodes beyond
    stop_token_ids: tuple[int, ...] = ()  # a tier that draws one of these ends its block with it
    grammar: str = ""  # of the output, as llguidance writes grammars (sampling/grammars.py); empty: any text
    # How many alternatives the target reports with the logprob of each output token, and of each prompt token. None: no
    # logprobs.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    selector: str = "snapkv"  # of the target alone: a key of kv.selectors.SELECTORS
    cache_salt: str = ""  # of the target alone: KV of equal texts is shared where the salts are equal, too

    @property
    def edits_logits(self) -> bool:
        """Whether the logits are changed before warping."""
        sampling = self.sampling
        listed = bool(sampling.min_tokens or sampling.logit_bias or sampling.bad_word_ids)
        return sampling.penalises or listed or bool(self.grammar)


@dataclass(frozen=True, slots=True)
class Span:
    """States that from position `start` on the sequence consists of `tokens` and nothing after them."""

    sequence_id: int  # never reused
    start: int
    tokens: tuple[int, ...]
    spec: SequenceSpec | None = None  # always present when start is 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def extended(self, tokens: tuple[int, ...]) -> Span:
        """The same span with `tokens` appended."""
        return Span(self.sequence_id, self.start, self.tokens + tokens, self.spec)


def agreement(one: Sequence[int], first: int, other: Sequence[int], second: int, most: int) -> int:
    """How many tokens of `one` from `first` on are those of `other` from `second` on; at most `most`, which is within
    both. Both are of one type, list or tuple.
    """
    done, size = 0, FIRST_COMPARED
    while done < most:
        size = min(size, most - done)
        if one[first + done : first + done + size] == other[second + done : second + done + size]:
            done, size = done + size, 2 * size
        elif size == 1:
            break
        else:  # the first difference is among these: compare half as many
            most, size = done + size, size // 2
    return done


def in_turn(earlier: Span, later: Span) -> Span:
    """Both spans as one. From `later.start` on, the tokens of the later span are valid; before it, those of the
    earlier.

    For work that is replaced before its tier has read it.
    """
    if not earlier.start < later.start <= earlier.end:
        return later
    kept = earlier.tokens[: later.start - earlier.start]
    return Span(earlier.sequence_id, earlier.start, kept + later.tokens, earlier.spec)


class Tree(NamedTuple):
    """Several continuations of a text that share their beginnings."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]  # of each token: the index of the token before it, which is smaller; -1: the text's end

    @property
    def depths(self) -> list[int]:
        """How many of these tokens come before each on its path."""
        found: list[int] = []
        for parent in self.parents:
            found.append(found[parent] + 1 if parent >= 0 else 0)
        return found

    @property
    def is_chain(self) -> bool:
        return all(parent == index - 1 for index, parent in enumerate(self.parents))

    def path(self, index: int) -> list[int]:
        """The tokens from the text's end to this one, included; none for -1."""
        found: list[int] = []
        while index >= 0:
            found.append(self.tokens[index])
            index = self.parents[index]
        return found[::-1]

    def child(self, index: int, token: int) -> int | None:
        """The first token that is this one and follows that of this index."""
        later = range(index + 1, len(self.tokens))
        return next((i for i in later if self.parents[i] == index and self.tokens[i] == token), None)

    def rejects(self, tokens: tuple[int, ...]) -> bool:
        """Whether these tokens leave the tree before they come to the end of one of its paths."""
        at = -1
        for token in tokens:
            if (found := self.child(at, token)) is None:
                return at in self.parents
            at = found
        return False

    def first_path(self) -> Tree:
        """The first token, the first that follows it, and so on."""
        path: list[int] = []
        for index, parent in enumerate(self.parents):
            if parent == (path[-1] if path else -1):
                path.append(index)
        return chain(tuple(self.tokens[index] for index in path))

    def kept(self, keep: Callable[[int, int], bool]) -> Tree:
        """What is left if a token remains where `keep`, asked with the token and its depth, and all before it allow."""
        places: dict[int, int] = {-1: -1}  # by old index
        for index, (token, depth) in enumerate(zip(self.tokens, self.depths, strict=True)):
            if self.parents[index] in places and keep(token, depth):
                places[index] = len(places) - 1
        left = [index for index in places if index >= 0]
        return Tree(tuple(self.tokens[i] for i in left), tuple(places[self.parents[i]] for i in left))


def chain(tokens: tuple[int, ...]) -> Tree:
    return Tree(tokens, tuple(range(-1, len(tokens) - 1)))


@dataclass(frozen=True, slots=True)
class Work:
    """A request to continue `span`.

    The level that gets this work hands up its block once it has `lookaheads[0]` tokens; the lowest level drafts at most
    so many, one after another. For the target the number is 1, so each of its blocks is one round. `lookaheads[1:]` are
    the numbers for the levels below. A level whose number is 0 is skipped. A block may be longer, because all tokens of
    its last round are kept. A block may be shorter: if the text ends, if a tier lacks text, a snapshot or room, or if
    the block is handed up early because the level above has nothing to do.
    """

    span: Span
    lookaheads: tuple[int, ...]
    sample: bool = True  # False: a prefill chunk, from which no token is drawn
    drafting: Drafting = Drafting.MODEL
    # Of the lowest level's model: the most tokens of a tree, or 0 if it is to draft one continuation; and the fewest
    # tokens that a further pass must be expected to give, or it is not run. 0: as many as `lookaheads` say.
    nodes: int = 0
    least_gain: float = 0.0


SCORED = 4  # length of the guesses by which prompt lookup is scored: about as long as a usual draft


class Tally(NamedTuple):
    """What one level did for one sequence. A verifying level counts what became of the tokens proposed to it; the
    lowest level counts what became of the tokens that prompt lookup finds, whether or not it proposes them.
    """

    rounds: int = 0
    proposed: int = 0  # tokens
    accepted: int = 0  # tokens, out of `proposed`
    rejected: int = 0  # rounds that ended at a rejected token; the tokens after it were not verified
    # Of `accepted` and `rejected`, those of proposals that prompt lookup made.
    lookup_accepted: int = 0
    lookup_rejected: int = 0
    passes: int = 0  # passes of this level's model in which the sequence took part
    busy_s: float = 0.0  # seconds that these passes took, with the drawing of their tokens
    drafts: int = 0  # of a verifying level: proposals with tokens that it verified, but for those of prompt lookup

    @property
    def counts(self) -> Tally:
        """The tally without seconds: equal for equal work."""
        return self._replace(busy_s=0.0)

    @property
    def acceptance(self) -> float | None:
        """The chance that a token is accepted if all before it were (α in docs/operations.md). None without data."""
        judged = self.accepted + self.rejected
        return self.accepted / judged if judged else None

    def __sub__(self, other: Tally) -> Tally:
        return Tally(*(a - b for a, b in zip(self, other, strict=True)))  # type: ignore[arg-type]

    def __add__(self, other: tuple[float, ...]) -> Tally:  # type: ignore[override]
        return Tally(*(a + b for a, b in zip(self, other, strict=True)))  # type: ignore[arg-type]


def wait_in_turn(waiting: dict[int, Work], work: list[Work]) -> None:
    """Add work to `waiting`. It replaces older work of its sequence, but keeps the tokens stated there."""
    for w in work:
        replaced = waiting.get(w.span.sequence_id)
        span = in_turn(replaced.span, w.span) if replaced else w.span
        waiting[w.span.sequence_id] = replace(w, span=span)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities in the model's own distribution, before any sampling parameter."""

    logprob: float | None  # of the token itself; None for the first token of a prompt, which nothing predicts
    top: tuple[tuple[int, float], ...] = ()  # the most probable token ids with theirs, the best first


@dataclass(frozen=True, slots=True)
class Proposal:
    """A continuation from position `start`. It may be empty; verifying it is then one plain decoding step."""

    sequence_id: int
    start: int  # absolute position of tokens[0]
    tokens: tuple[int, ...] = ()
    origins: bytes = b""  # one Origin per token
    missing_from: int | None = None  # the tier lacks tokens of this sequence: state it again from here
    snapshot_wanted: bool = False  # the tier lacks the sparse KV of this sequence and needs a snapshot
    tallies: tuple[Tally, ...] = ()  # of this proposal: the answering level first, then the levels below
    parents: tuple[int, ...] = ()  # of a tree, as `Tree` has them; none: each token follows the one before it
    # The fields below never cross a link. The target alone fills in logprobs.
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, where asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt tokens that the work's span stated
    no_token: bool = False  # the parameters exclude every token that could follow

    @property
    def tree(self) -> Tree:
        return Tree(self.tokens, self.parents) if self.parents else chain(self.tokens)


class Proposer(Protocol):
    """A tier as the level above sees it. Each submitted Work gets one answer, unless later Work replaces it."""

    def submit(self, work: list[Work]) -> None: ...

    def collect(self, timeout_s: float) -> list[Proposal]:
        """Return the proposals that are ready, in any order. If none is ready, this may block: a remote tier for up to
        `timeout_s` seconds, a model until it has drafted, a decoder with one micro-batch until it has all its
        proposals.
        """
        ...

    def release(self, sequence_ids: list[int]) -> None:
        """Forget these sequences; unknown ones are ignored."""
        ...


@dataclass(frozen=True, slots=True)
class Claim:
    """A proposal to be verified: `proposed` holds the tokens of the level below, `span` states the text before them."""

    span: Span
    proposed: tuple[int, ...]
    sample: bool = True  # False: only forward the span, which is a prefill chunk
    parents: tuple[int, ...] = ()  # of a tree, as in `Proposal`

    @property
    def tree(self) -> Tree:
        return Tree(self.proposed, self.parents) if self.parents else chain(self.proposed)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of verifying a claim. `tokens` continue its span: `num_accepted` are accepted, at most one is new."""

    tokens: tuple[int, ...] = ()
    num_accepted: int = 0
    ended: bool = False  # the last token is a stop token, or max_length is reached
    missing_from: int | None = None
    snapshot_wanted: bool = False
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token of `tokens`, where asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt tokens of the claim's span
    no_token: bool = False  # the sampling parameters exclude every token that could follow `tokens`
