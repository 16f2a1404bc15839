"""Converts requests, their outputs and the messages between tiers to their wire form and back. All functions are pure.
Malformed messages between tiers are refused here and nowhere else; requests are checked further by the engine's limits.

A `…_from_proto` that finds a rule broken raises `InvalidValueError` with the path of the field in the message.
"""

from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, fields, replace
from itertools import islice
from math import inf

from triforce_core._gen.triforce.v1 import generation_pb2 as gen
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import MAX_LOOKAHEAD, MAX_NODES
from triforce_core.engine.controller import Figures
from triforce_core.engine.limits import MAX_LOGPROBS, MAX_STOP_TOKENS
from triforce_core.engine.sequence import FinishReason, Output, Request, Stats, Totals
from triforce_core.errors import InvalidValueError, require
from triforce_core.kv.sizes import MAX_BLOCK
from triforce_core.messages import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIASED_TOKENS,
    UNCHANGED,
    Drafting,
    Origin,
    Proposal,
    SamplingParams,
    SequenceSpec,
    Span,
    Tally,
    Tier,
    TokenLogprobs,
    Work,
)

NUM_TOKEN_IDS = 2**31  # no vocabulary is larger; ids fit a signed 32-bit integer
SEED_VALUES = 2**64
MAX_CONTEXT = 2**24  # tokens; no model reads a longer text
MAX_ITEMS = 2**16  # of a batch
MAX_DRAFTED = 2 * MAX_LOOKAHEAD  # a plan without the retrieval tier adds both lookaheads
MAX_COUNT = 2**32  # in the tallies of one proposal, whose sums must fit 64 bits
MAX_KEYED_SALT_CHARACTERS = 4096  # a client's, and the name of its API key
MAX_GRAMMAR_CHARACTERS = 2**22  # in llguidance's form, which is several times as long as what clients send
ORIGINS, DRAFTINGS = [*map(int, Origin)], [*map(int, Drafting)]
FINISH_REASONS: dict[FinishReason, gen.FinishReason] = {
    FinishReason.STOP: gen.FINISH_REASON_STOP,
    FinishReason.LENGTH: gen.FINISH_REASON_LENGTH,
}
NUMBERS = [field.name for field in fields(SamplingParams) if field.name not in ("logit_bias", "bad_word_ids")]
FIGURES = [field.name for field in fields(Stats) if field.name not in ("plans", "tallies", "direct")]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a tier knows of the text that it can be told; by default, what holds for every tier."""

    vocab_size: int = NUM_TOKEN_IDS
    context_length: int = MAX_CONTEXT


ANY_TIER = Bounds()


def work_batch_to_proto(work: Iterable[Work], release: Iterable[int] = ()) -> pb.WorkBatch:
    return pb.WorkBatch(work=[_work_to_proto(item) for item in work], release=release)


def work_batch_from_proto(batch: pb.WorkBatch, bounds: Bounds = ANY_TIER) -> tuple[list[Work], list[int]]:
    """The batch's work, and the ids of the sequences to release after it."""
    check_count("work", batch.work, MAX_ITEMS)
    check_count("release", batch.release, MAX_ITEMS)
    work = [_work_from_proto(item, f"work[{index}]", bounds) for index, item in enumerate(batch.work)]
    return work, list(batch.release)


def proposal_batch_to_proto(proposals: Iterable[Proposal]) -> pb.ProposalBatch:
    return pb.ProposalBatch(proposals=[_proposal_to_proto(proposal) for proposal in proposals])


def proposal_batch_from_proto(batch: pb.ProposalBatch) -> list[Proposal]:
    check_count("proposals", batch.proposals, MAX_ITEMS)
    return [_proposal_from_proto(item, f"proposals[{index}]") for index, item in enumerate(batch.proposals)]


def sampling_to_proto(sampling: SamplingParams) -> gen.Sampling:
    """The message with every field set, even those at their defaults."""
    return gen.Sampling(
        **{name: getattr(sampling, name) for name in NUMBERS},
        logit_bias=dict(sampling.logit_bias),
        bad_word_ids=[gen.TokenIds(values=word) for word in sampling.bad_word_ids],
    )


def sampling_from_proto(
    message: gen.Sampling, where: str = "sampling", vocab_size: int = NUM_TOKEN_IDS
) -> SamplingParams:
    """Sampling parameters sent between tiers, where an unset field is refused: its default might be another there."""
    for name in NUMBERS:
        require(message.HasField(name), f"{where}.{name}", None, "must be present")
    try:
        sampling = sampling_from_client(message)
    except InvalidValueError as error:
        raise InvalidValueError(f"{where}.{error.field}", error.value, error.rule) from None
    check_token_ids(f"{where}.logit_bias", [token for token, _ in sampling.logit_bias], vocab_size)
    check_token_ids(f"{where}.bad_word_ids", [token for word in sampling.bad_word_ids for token in word], vocab_size)
    return sampling


def sampling_from_client(message: gen.Sampling, defaults: SamplingParams = UNCHANGED) -> SamplingParams:
    """Sampling parameters of a client, where an unset field takes its default, and bad words come to the default ones.
    Errors name the field without a path.
    """
    # Of longer lists no more is read than shows that they are too long.
    words = [tuple(word.values[: MAX_BAD_WORD_TOKENS + 1]) for word in message.bad_word_ids[: MAX_BAD_WORDS + 1]]
    return replace(
        defaults,
        **{name: getattr(message, name) for name in NUMBERS if message.HasField(name)},
        logit_bias=tuple(sorted(islice(message.logit_bias.items(), MAX_BIASED_TOKENS + 1))),
        bad_word_ids=(*defaults.bad_word_ids, *words),
    )


def logprobs_to_proto(logprobs: Iterable[TokenLogprobs]) -> list[gen.TokenLogprobs]:
    return [
        gen.TokenLogprobs(
            logprob=each.logprob,
            top_ids=[token for token, _ in each.top],
            top_logprobs=[logprob for _, logprob in each.top],
        )
        for each in logprobs
    ]


def logprobs_from_proto(messages: Sequence[gen.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    for each in messages:
        check_count("logprobs.top_ids", each.top_ids, MAX_LOGPROBS)
        rule = f"must be as many as top_ids, {len(each.top_ids)}"
        require(len(each.top_logprobs) == len(each.top_ids), "logprobs.top_logprobs", len(each.top_logprobs), rule)
    return tuple(
        TokenLogprobs(
            each.logprob if each.HasField("logprob") else None, tuple(zip(each.top_ids, each.top_logprobs, strict=True))
        )
        for each in messages
    )


def tallies_to_proto(tallies: Iterable[Tally]) -> list[pb.Tally]:
    return [pb.Tally(**each._asdict()) for each in tallies]


def tallies_from_proto(messages: Iterable[pb.Tally], where: str = "tallies", most: float = inf) -> tuple[Tally, ...]:
    tallies = tuple(Tally(*(getattr(each, name) for name in Tally._fields)) for each in messages)
    for index, each in enumerate(tallies):
        judged = each.accepted + each.rejected
        require(max(each) < most, f"{where}[{index}]", each, f"must hold numbers below {most}")
        require(judged <= each.proposed, f"{where}[{index}]", each, "judged more tokens than were proposed")
        looked_up = each.lookup_accepted <= each.accepted and each.lookup_rejected <= each.rejected
        require(looked_up, f"{where}[{index}]", each, "judged more tokens of prompt lookup than it judged in all")
        require(0 <= each.busy_s < inf, f"{where}[{index}].busy_s", each.busy_s, "must be 0 or more seconds")
    return tallies


def request_to_proto(request: Request) -> pb.DecodeRequest:
    return pb.DecodeRequest(
        prompt_token_ids=request.prompt,
        resume_token_ids=request.resume,
        sampling=sampling_to_proto(request.sampling),
        seed=seed_to_proto(request.seed),
        max_tokens=request.max_tokens,
        stop_token_ids=request.stop_token_ids,
        lookaheads=None if request.lookaheads is None else gen.Lookaheads(values=request.lookaheads),
        drafting=int(request.drafting),
        selector=request.selector or "",
        cache_salt=request.cache_salt,
        grammar=request.grammar,
        logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs,
        priority=request.priority,
        timeout_s=request.timeout_s,
    )


def request_from_proto(message: pb.DecodeRequest, default_lookaheads: tuple[int, int] | None) -> Request:
    """The engine's form of a request. Raises `InvalidValueError` naming the field."""
    rule = f"must be at most {MAX_KEYED_SALT_CHARACTERS} characters"
    require(len(message.cache_salt) <= MAX_KEYED_SALT_CHARACTERS, "cache_salt", len(message.cache_salt), rule)
    timeout_s = message.timeout_s if message.HasField("timeout_s") else None
    require(timeout_s is None or 0 < timeout_s < inf, "timeout_s", timeout_s, "must be above 0 and finite")
    lookaheads = default_lookaheads
    if message.HasField("lookaheads"):
        given = tuple(message.lookaheads.values[:3])
        require(len(given) == 2, "lookaheads", given, "must hold two numbers: retrieval and draft")
        bounded = all(n <= MAX_LOOKAHEAD for n in given)
        require(bounded, "lookaheads", given, f"must each be at most {MAX_LOOKAHEAD}")
        lookaheads = given[0], given[1]
    return Request(
        prompt=tokens_from_proto(message.prompt_token_ids, "prompt_token_ids", MAX_CONTEXT),
        resume=tokens_from_proto(message.resume_token_ids, "resume_token_ids", MAX_CONTEXT),
        max_tokens=message.max_tokens,
        sampling=sampling_from_proto(message.sampling),
        seed=seed_from_proto(message.seed),
        lookaheads=lookaheads,
        drafting=drafting_from_proto(message.drafting, "request"),
        selector=message.selector or None,
        cache_salt=message.cache_salt,
        stop_token_ids=tokens_from_proto(message.stop_token_ids, "stop_token_ids", MAX_STOP_TOKENS),
        grammar=grammar_from_proto(message.grammar, "grammar"),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        priority=message.priority,
        timeout_s=timeout_s,
    )


def stats_to_proto(stats: Stats) -> pb.DecodeStats:
    return pb.DecodeStats(
        **{name: getattr(stats, name) for name in FIGURES},
        tallies=tallies_to_proto(stats.tallies),
        plans=stats.plans,
        direct=tallies_to_proto([stats.direct])[0],
    )


def stats_from_proto(message: pb.DecodeStats) -> Stats:
    figures = {name: getattr(message, name) for name in FIGURES}
    absent = {name: None for name in ("expected_ms", "plain_ms") if not message.HasField(name)}
    return Stats(
        **figures | absent,
        plans=dict(message.plans),
        direct=tallies_from_proto([message.direct])[0],
        tallies=list(tallies_from_proto(message.tallies)),
    )


def event_to_proto(output: Output, *, stats: bool) -> pb.DecodeEvent:
    """`stats`: whether an event that is not the last has them."""
    return pb.DecodeEvent(
        token_ids=output.tokens,
        origins=output.origins,
        finish_reason=finish_reason_to_proto(output.finish_reason),
        stats=stats_to_proto(output.stats) if stats or output.finish_reason else None,
        logprobs=logprobs_to_proto(output.logprobs),
        prompt_logprobs=logprobs_to_proto(output.prompt_logprobs),
        no_token=output.finish_reason is FinishReason.NO_TOKEN,
    )


def is_notice(event: pb.DecodeEvent) -> bool:
    """Whether the event only reports that the request was received or that its first pass begins, without output."""
    return event.entered or bool(event.fingerprint)


def totals_to_proto(totals: Totals) -> pb.Totals:
    stats = totals.stats
    return pb.Totals(
        tallies=tallies_to_proto(stats.tallies),
        direct=tallies_to_proto([stats.direct])[0],
        plans=stats.plans,
        snapshots=stats.snapshots,
        preempted=stats.preempted,
        rounds_by_tokens=totals.rounds_by_tokens,
        prefix_hit_tokens=totals.prefix_hit_tokens,
        prefix_miss_tokens=totals.prefix_miss_tokens,
    )


def controller_to_proto(figures: Figures) -> pb.ControllerStatus:
    known = figures.acceptance.items()
    return pb.ControllerStatus(
        latest=figures.latest,
        plans=figures.rounds,
        corrections=figures.corrections,
        acceptance=[pb.KnownAcceptance(temperature=at, **chances._asdict()) for at, chances in sorted(known)],
    )


def check_count(field: str, values: Sized, most: int) -> None:
    """Raise `InvalidValueError` if a list is longer than any that a peer needs; call it before the list is copied."""
    require(len(values) <= most, field, len(values), f"must hold at most {most}")


def check_token_ids(field: str, tokens: Iterable[int], vocab_size: int) -> None:
    highest = max(tokens, default=0)
    require(highest < vocab_size, field, highest, f"is not a token id: must be below {vocab_size}")


def tokens_from_proto(values: Sequence[int], where: str, most: int, vocab_size: int = NUM_TOKEN_IDS) -> tuple[int, ...]:
    check_count(where, values, most)
    tokens = tuple(values)
    check_token_ids(where, tokens, vocab_size)
    return tokens


def grammar_from_proto(grammar: str, where: str) -> str:
    rule = f"must be at most {MAX_GRAMMAR_CHARACTERS} characters"
    require(len(grammar) <= MAX_GRAMMAR_CHARACTERS, where, f"{len(grammar)} characters", rule)
    return grammar


def origins_from_proto(origins: bytes, num_tokens: int, where: str) -> bytes:
    require(len(origins) == num_tokens, where, origins, f"must hold one origin for each of {num_tokens} tokens")
    require(max(origins, default=0) <= max(ORIGINS), where, origins, f"must hold values of {ORIGINS}")
    return origins


def seed_to_proto(seed: int) -> int:
    """A signed 64-bit seed in two's complement."""
    return seed % SEED_VALUES


def seed_from_proto(seed: int) -> int:
    return seed - SEED_VALUES if seed >= SEED_VALUES // 2 else seed


def drafting_from_proto(value: int, where: str) -> Drafting:
    require(value in DRAFTINGS, f"{where}.drafting", value, f"must be one of {DRAFTINGS}")
    return Drafting(value)


def _work_to_proto(work: Work) -> pb.Work:
    return pb.Work(
        span=_span_to_proto(work.span),
        lookaheads=work.lookaheads,
        sample=work.sample,
        drafting=int(work.drafting),
        nodes=work.nodes,
        least_gain=work.least_gain,
    )


def _work_from_proto(message: pb.Work, where: str, bounds: Bounds) -> Work:
    require(message.HasField("span"), f"{where}.span", None, "must be present")
    span = _span_from_proto(message.span, f"{where}.span", bounds)
    levels, field = len(Tier), f"{where}.lookaheads"
    given = len(message.lookaheads)
    require(1 <= given <= levels, field, f"{given} numbers", f"must be 1 to {levels} numbers, one for each level")
    lookaheads = tuple(message.lookaheads)
    require(max(lookaheads) <= MAX_DRAFTED, field, lookaheads, f"must each be at most {MAX_DRAFTED}")
    require(message.nodes <= MAX_NODES, f"{where}.nodes", message.nodes, f"must be at most {MAX_NODES}")
    chance, rule = message.least_gain, "must be between 0 and 1"
    require(0 <= chance <= 1, f"{where}.least_gain", chance, rule)
    return Work(span, lookaheads, message.sample, drafting_from_proto(message.drafting, where), message.nodes, chance)


def _span_to_proto(span: Span) -> pb.Span:
    spec = None if span.spec is None else _spec_to_proto(span.spec)
    return pb.Span(sequence_id=span.sequence_id, start=span.start, tokens=span.tokens, spec=spec)


def _span_from_proto(message: pb.Span, where: str, bounds: Bounds) -> Span:
    most, start = bounds.context_length, message.start
    require(start <= most, f"{where}.start", start, f"must be within the context of {most} tokens")
    tokens = tokens_from_proto(message.tokens, f"{where}.tokens", most - start, bounds.vocab_size)
    spec = _spec_from_proto(message.spec, f"{where}.spec", bounds) if message.HasField("spec") else None
    require(spec is not None or message.start > 0, f"{where}.spec", None, "must be present where start is 0")
    return Span(message.sequence_id, message.start, tokens, spec)


def _spec_to_proto(spec: SequenceSpec) -> pb.SequenceSpec:
    return pb.SequenceSpec(
        sampling=sampling_to_proto(spec.sampling),
        seed=seed_to_proto(spec.seed),
        prompt_length=spec.prompt_length,
        max_length=spec.max_length,
        stop_token_ids=spec.stop_token_ids,
        grammar=spec.grammar,
    )


def _spec_from_proto(message: pb.SequenceSpec, where: str, bounds: Bounds) -> SequenceSpec:
    require(message.HasField("sampling"), f"{where}.sampling", None, "must be present")
    require(message.prompt_length > 0, f"{where}.prompt_length", message.prompt_length, "must be 1 or more")
    rule = f"must be at least prompt_length ({message.prompt_length}) and at most {bounds.context_length}"
    fits = message.prompt_length <= message.max_length <= bounds.context_length
    require(fits, f"{where}.max_length", message.max_length, rule)
    stop_token_ids = tokens_from_proto(
        message.stop_token_ids, f"{where}.stop_token_ids", MAX_STOP_TOKENS, bounds.vocab_size
    )
    return SequenceSpec(
        sampling=sampling_from_proto(message.sampling, f"{where}.sampling", bounds.vocab_size),
        seed=seed_from_proto(message.seed),
        prompt_length=message.prompt_length,
        max_length=message.max_length,
        stop_token_ids=stop_token_ids,
        grammar=grammar_from_proto(message.grammar, f"{where}.grammar"),
    )


def finish_reason_to_proto(reason: FinishReason | None) -> gen.FinishReason:
    """The wire form of a finish reason."""
    unspecified = gen.FINISH_REASON_UNSPECIFIED
    return FINISH_REASONS.get(reason, unspecified) if reason else unspecified


def finish_reason_from_proto(value: gen.FinishReason) -> FinishReason | None:
    return next((reason for reason, sent in FINISH_REASONS.items() if sent == value), None)


def _proposal_to_proto(proposal: Proposal) -> pb.Proposal:
    return pb.Proposal(
        sequence_id=proposal.sequence_id,
        start=proposal.start,
        tokens=proposal.tokens,
        origins=proposal.origins,
        missing_from=proposal.missing_from,
        snapshot_wanted=proposal.snapshot_wanted,
        tallies=tallies_to_proto(proposal.tallies),
        parents=proposal.parents,
    )


def _proposal_from_proto(message: pb.Proposal, where: str) -> Proposal:
    tokens, start = tokens_from_proto(message.tokens, f"{where}.tokens", MAX_BLOCK), message.start
    require(start <= MAX_CONTEXT, f"{where}.start", start, f"must be at most {MAX_CONTEXT}")
    missing_from = message.missing_from if message.HasField("missing_from") else None
    # Text beyond the stated end was never stated; with such a start the level above would wait for ever.
    stated = missing_from is None or missing_from <= start
    require(stated, f"{where}.missing_from", missing_from, f"must be at most start, {start}")
    check_count(f"{where}.tallies", message.tallies, len(Tier))
    return Proposal(
        sequence_id=message.sequence_id,
        start=start,
        tokens=tokens,
        origins=origins_from_proto(message.origins, len(tokens), f"{where}.origins"),
        missing_from=missing_from,
        snapshot_wanted=message.snapshot_wanted,
        tallies=tallies_from_proto(message.tallies, f"{where}.tallies", MAX_COUNT),
        parents=parents_from_proto(message.parents, len(tokens), f"{where}.parents"),
    )


def parents_from_proto(values: Sequence[int], num_tokens: int, where: str) -> tuple[int, ...]:
    """The parents of a tree, or none."""
    if not values:
        return ()
    check_count(where, values, MAX_NODES)
    require(len(values) == num_tokens, where, len(values), f"must be one for each of {num_tokens} tokens")
    for index, parent in enumerate(values):
        require(-1 <= parent < index, f"{where}[{index}]", parent, f"must be from -1 to {index - 1}")
    return tuple(values)
