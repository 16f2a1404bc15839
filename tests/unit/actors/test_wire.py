"""The wire carries messages without loss, and refuses what breaks a rule by the name of the field."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from actors import wire
from actors.wire import request_from_proto
from tests.random_messages import messages
from triforce_core._gen.triforce.v1 import generation_pb2 as gen
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.client.results import FINISH_REASONS
from triforce_core.config import MAX_NODES, SELECTOR_NAMES
from triforce_core.engine.limits import Limits
from triforce_core.engine.sequence import FinishReason, Request
from triforce_core.errors import InvalidValueError
from triforce_core.kv.sizes import MAX_BLOCK
from triforce_core.messages import GREEDY, Drafting, Proposal, SamplingParams, SequenceSpec, Span, Tally, Tier, Work

ids = st.integers(0, 2**64 - 1)
positions = st.integers(0, wire.MAX_CONTEXT)
counts = st.integers(0, 2**30)
token_tuples = st.lists(st.integers(0, 2**31 - 1), max_size=8).map(tuple)
samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    min_tokens=st.integers(0, 2**31 - 1),
    logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=3).map(
        lambda biases: tuple(biases.items())
    ),
    bad_word_ids=st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3).map(tuple), max_size=3).map(
        tuple
    ),
)


@st.composite
def specs(draw: st.DrawFn) -> SequenceSpec:
    prompt_length = draw(st.integers(1, wire.MAX_CONTEXT))
    return SequenceSpec(
        sampling=draw(samplings),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        prompt_length=prompt_length,
        max_length=draw(st.integers(prompt_length, wire.MAX_CONTEXT)),
        stop_token_ids=draw(token_tuples),
        grammar=draw(st.text(max_size=8)),
    )


@st.composite
def spans(draw: st.DrawFn) -> Span:
    start = draw(st.integers(0, wire.MAX_CONTEXT - 8))
    spec = draw(specs() if start == 0 else st.none() | specs())
    return Span(draw(ids), start, draw(token_tuples), spec)


@st.composite
def tallies(draw: st.DrawFn) -> Tally:
    accepted, rejected, unjudged = draw(counts), draw(counts), draw(counts)
    return Tally(draw(counts), accepted + rejected + unjudged, accepted, rejected)


@st.composite
def proposals(draw: st.DrawFn) -> Proposal:
    tokens, start = draw(token_tuples), draw(positions)
    tree = bool(tokens) and len(tokens) <= MAX_NODES and draw(st.booleans())
    return Proposal(
        parents=tuple(draw(st.integers(-1, index - 1)) for index in range(len(tokens))) if tree else (),
        sequence_id=draw(ids),
        start=start,
        tokens=tokens,
        origins=bytes(draw(st.sampled_from(Tier)) for _ in tokens),
        missing_from=draw(st.none() | st.integers(0, start)),
        snapshot_wanted=draw(st.booleans()),
        tallies=tuple(draw(st.lists(tallies(), max_size=3))),
    )


lookaheads = st.lists(st.integers(0, wire.MAX_DRAFTED), min_size=1, max_size=3).map(tuple)
works = st.builds(
    Work, spans(), lookaheads, st.booleans(), st.sampled_from(Drafting), st.integers(0, MAX_NODES), st.floats(0, 1)
)


REQUEST_FIELDS = {
    "prompt": token_tuples,
    "max_tokens": positions,
    "sampling": samplings,
    "seed": st.integers(-(2**63), 2**63 - 1),
    "lookaheads": st.none() | st.tuples(st.integers(0, 64), st.integers(0, 64)),
    "stop_token_ids": token_tuples,
    "resume": token_tuples,
    "grammar": st.text(max_size=8),
    "logprobs": st.none() | positions,
    "prompt_logprobs": st.none() | positions,
    "priority": st.integers(-(2**31), 2**31 - 1),
    "timeout_s": st.none() | st.floats(0, exclude_min=True, allow_infinity=False),
    "drafting": st.sampled_from(Drafting),
    "selector": st.none() | st.sampled_from(SELECTOR_NAMES),
    "cache_salt": st.text(max_size=8),
}


@given(st.builds(Request, **REQUEST_FIELDS))
def test_requests_survive_the_wire(request: Request) -> None:
    assert REQUEST_FIELDS.keys() == Request.__dataclass_fields__.keys()
    sent = wire.request_to_proto(request).SerializeToString()
    assert request_from_proto(pb.DecodeRequest.FromString(sent), None) == request


@given(st.lists(works, max_size=3), st.lists(ids, max_size=3))
def test_work_survives_the_wire(work: list[Work], release: list[int]) -> None:
    sent = wire.work_batch_to_proto(work, release).SerializeToString()
    assert wire.work_batch_from_proto(pb.WorkBatch.FromString(sent)) == (work, release)


@given(st.lists(proposals(), max_size=3))
def test_proposals_survive_the_wire(answers: list[Proposal]) -> None:
    sent = wire.proposal_batch_to_proto(answers).SerializeToString()
    assert wire.proposal_batch_from_proto(pb.ProposalBatch.FromString(sent)) == answers


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (Work.__dataclass_fields__, pb.Work),
        (Span.__dataclass_fields__, pb.Span),
        (SequenceSpec.__dataclass_fields__, pb.SequenceSpec),
        (SamplingParams.__dataclass_fields__, gen.Sampling),
        (Proposal.__dataclass_fields__, pb.Proposal),
        (Tally._fields, pb.Tally),
    ],
)
def test_no_field_is_left_behind(fields: Iterable[str], message: type[Message]) -> None:
    """The strategies above might forget a new field, too. Only the target and its engine use logprobs, `no_token`, the
    selector and the cache's salt, so the wire leaves them out.
    """
    local = {"logprobs", "prompt_logprobs", "no_token", "selector", "cache_salt"}
    assert [name for name in fields if name not in local] == [field.name for field in message.DESCRIPTOR.fields]


@given(messages(pb.WorkBatch.DESCRIPTOR))
def test_whatever_work_says_it_is_within_bounds_or_refused(batch: pb.WorkBatch) -> None:
    with suppress(InvalidValueError):
        for work in wire.work_batch_from_proto(batch, wire.Bounds(VOCABULARY, CONTEXT))[0]:
            assert 1 <= len(work.lookaheads) <= len(Tier)
            assert max(work.lookaheads) <= wire.MAX_DRAFTED
            assert work.span.end <= CONTEXT
            assert max(work.span.tokens, default=0) < VOCABULARY


@given(messages(pb.ProposalBatch.DESCRIPTOR))
def test_whatever_a_proposal_says_it_is_within_bounds_or_refused(batch: pb.ProposalBatch) -> None:
    with suppress(InvalidValueError):
        for proposal in wire.proposal_batch_from_proto(batch):
            assert len(proposal.tokens) == len(proposal.origins) <= MAX_BLOCK
            assert (proposal.missing_from or 0) <= proposal.start <= wire.MAX_CONTEXT
            assert all(0 <= number < wire.MAX_COUNT for tally in proposal.tallies for number in tally)


@given(messages(pb.DecodeRequest.DESCRIPTOR))
def test_whatever_a_request_says_it_has_a_form_or_is_refused(message: pb.DecodeRequest) -> None:
    with suppress(InvalidValueError):
        request = request_from_proto(message, (0, 0))
        Limits(CONTEXT, CONTEXT, VOCABULARY).check(request)
        assert request.timeout_s is None or 0 < request.timeout_s < math.inf


@given(samplings)
def test_a_client_s_sampling_arrives_as_it_was_said(sampling: SamplingParams) -> None:
    assert wire.sampling_from_client(gen.Sampling.FromString(wire.sampling_to_proto(sampling).SerializeToString())) == (
        sampling
    )


def test_what_a_client_leaves_out_takes_its_default_and_0_is_not_left_out() -> None:
    assert wire.sampling_from_client(gen.Sampling()) == SamplingParams()
    assert wire.sampling_from_client(gen.Sampling(temperature=0)) == GREEDY
    with pytest.raises(InvalidValueError, match=r"^top_p: 0\.0 must be above 0"):
        wire.sampling_from_client(gen.Sampling(top_p=0))


def test_missing_from_the_start_is_not_missing_nothing() -> None:
    sent = [Proposal(1, 5, missing_from=0), Proposal(1, 5, missing_from=None)]
    received = wire.proposal_batch_from_proto(wire.proposal_batch_to_proto(sent))
    assert [each.missing_from for each in received] == [0, None]


@pytest.mark.parametrize(
    ("seed", "sent"), [(0, 0), (2**63 - 1, 2**63 - 1), (-1, 2**64 - 1), (-(2**63), 2**63)], ids=str
)
def test_seeds_are_sent_in_two_s_complement(seed: int, sent: int) -> None:
    assert wire.seed_to_proto(seed) == sent
    assert wire.seed_from_proto(sent) == seed


def test_a_token_costs_a_few_bytes() -> None:
    """Packed: 128K tokens of a 128K vocabulary fit well into one gRPC message."""
    span = Span(1, 1, tuple(range(131_072)))
    assert wire.work_batch_to_proto([Work(span, (8, 3))]).ByteSize() < 3 * 131_072 + 64


def good_work() -> pb.Work:
    spec = SequenceSpec(GREEDY, seed=3, prompt_length=2, max_length=9, stop_token_ids=(0,))
    return wire.work_batch_to_proto([Work(Span(7, 0, (4, 5), spec), (8, 3))]).work[0]


def good_proposal() -> pb.Proposal:
    return wire.proposal_batch_to_proto([Proposal(7, 2, (4, 5), b"\x00\x01", tallies=(Tally(1, 2, 1, 1),))]).proposals[
        0
    ]


def test_the_good_examples_are_good() -> None:
    """If they were not, the tests below would pass for the wrong reason."""
    wire.work_batch_from_proto(pb.WorkBatch(work=[good_work()]))
    wire.proposal_batch_from_proto(pb.ProposalBatch(proposals=[good_proposal()]))


VOCABULARY, CONTEXT = 1000, 100  # what the tier of the tests below knows
LONG = range(1025)
BAD_WORK: list[tuple[str, Callable[[pb.Work], object]]] = [
    ("nodes", lambda work: setattr(work, "nodes", MAX_NODES + 1)),
    ("least_gain", lambda work: setattr(work, "least_gain", math.nan)),
    ("span", lambda work: work.ClearField("span")),
    ("span.spec", lambda work: work.span.ClearField("spec")),
    ("span.tokens", lambda work: work.span.tokens.append(2**31)),
    ("span.spec.sampling", lambda work: work.span.spec.ClearField("sampling")),
    ("span.spec.sampling.temperature", lambda work: setattr(work.span.spec.sampling, "temperature", -1)),
    ("span.spec.sampling.temperature", lambda work: setattr(work.span.spec.sampling, "temperature", math.nan)),
    *[
        (f"span.spec.sampling.{name}", lambda work, name=name: work.span.spec.sampling.ClearField(name))
        for name in wire.NUMBERS
    ],
    ("span.spec.sampling.min_p", lambda work: setattr(work.span.spec.sampling, "min_p", 2)),
    ("span.spec.sampling.top_k", lambda work: setattr(work.span.spec.sampling, "top_k", 2**31)),
    ("span.spec.prompt_length", lambda work: work.span.spec.ClearField("prompt_length")),
    ("span.spec.max_length", lambda work: setattr(work.span.spec, "max_length", 1)),
    ("span.spec.stop_token_ids", lambda work: work.span.spec.stop_token_ids.append(2**32 - 1)),
    ("span.spec.stop_token_ids", lambda work: work.span.spec.stop_token_ids.append(VOCABULARY)),
    ("span.spec.stop_token_ids", lambda work: work.span.spec.stop_token_ids.extend(range(257))),
    ("span.spec.grammar", lambda work: setattr(work.span.spec, "grammar", "a" * (2**22 + 1))),
    ("span.spec.max_length", lambda work: setattr(work.span.spec, "max_length", CONTEXT + 1)),
    ("span.spec.max_length", lambda work: setattr(work.span.spec, "max_length", 2**32 - 1)),
    ("span.spec.sampling.logit_bias", lambda work: work.span.spec.sampling.logit_bias.update({VOCABULARY: 1.0})),
    ("span.spec.sampling.logit_bias", lambda work: work.span.spec.sampling.logit_bias.update({3: math.inf})),
    ("span.spec.sampling.logit_bias", lambda work: work.span.spec.sampling.logit_bias.update(dict.fromkeys(LONG, 1.0))),
    (
        "span.spec.sampling.bad_word_ids",
        lambda work: work.span.spec.sampling.bad_word_ids.append(gen.TokenIds(values=[VOCABULARY])),
    ),
    ("span.spec.sampling.bad_words", lambda work: work.span.spec.sampling.bad_word_ids.extend([gen.TokenIds()] * 257)),
    ("span.start", lambda work: setattr(work.span, "start", CONTEXT + 1)),
    ("span.tokens", lambda work: work.span.tokens.append(VOCABULARY)),
    ("span.tokens", lambda work: work.span.tokens.extend(LONG)),
    ("lookaheads", lambda work: work.ClearField("lookaheads")),
    ("lookaheads", lambda work: work.lookaheads.extend([1, 1])),
    ("lookaheads", lambda work: work.lookaheads.__setitem__(0, 129)),
    ("lookaheads", lambda work: work.lookaheads.__setitem__(1, 2**32 - 1)),
    ("drafting", lambda work: setattr(work, "drafting", 3)),
]

BAD_PROPOSALS: list[tuple[str, Callable[[pb.Proposal], object]]] = [
    ("tokens", lambda proposal: proposal.tokens.append(2**31)),
    ("origins", lambda proposal: proposal.ClearField("origins")),
    ("origins", lambda proposal: setattr(proposal, "origins", b"\x00\x04")),
    ("tallies[0]", lambda proposal: setattr(proposal.tallies[0], "accepted", 2)),
    ("tallies[0]", lambda proposal: setattr(proposal.tallies[0], "passes", 2**64 - 1)),
    ("tallies[0]", lambda proposal: setattr(proposal.tallies[0], "busy_s", 1e300)),
    ("tallies[0].busy_s", lambda proposal: setattr(proposal.tallies[0], "busy_s", math.nan)),
    ("tallies", lambda proposal: proposal.tallies.extend([pb.Tally()] * 3)),
    ("tokens", lambda proposal: proposal.tokens.extend([1] * 200)),
    ("start", lambda proposal: setattr(proposal, "start", 2**32 - 1)),
    ("missing_from", lambda proposal: setattr(proposal, "missing_from", 3)),
    ("parents", lambda proposal: proposal.parents.append(-1)),
    ("parents", lambda proposal: proposal.parents.extend([-1] * 100)),
    ("parents[1]", lambda proposal: proposal.parents.extend([-1, 1])),
    ("parents[0]", lambda proposal: proposal.parents.extend([-2, 0])),
]


@pytest.mark.parametrize(("field", "spoil"), BAD_WORK)
def test_bad_work_is_refused_by_name(field: str, spoil: Callable[[pb.Work], object]) -> None:
    bad = good_work()
    spoil(bad)
    with pytest.raises(InvalidValueError) as refusal:
        wire.work_batch_from_proto(pb.WorkBatch(work=[good_work(), bad]), wire.Bounds(VOCABULARY, CONTEXT))
    assert refusal.value.field == f"work[1].{field}"


@pytest.mark.parametrize(("field", "spoil"), BAD_PROPOSALS)
def test_bad_proposals_are_refused_by_name(field: str, spoil: Callable[[pb.Proposal], object]) -> None:
    bad = good_proposal()
    spoil(bad)
    with pytest.raises(InvalidValueError) as refusal:
        wire.proposal_batch_from_proto(pb.ProposalBatch(proposals=[good_proposal(), bad]))
    assert refusal.value.field == f"proposals[1].{field}"


def test_finish_reasons_are_the_same_words_in_the_engine_on_the_wire_and_in_the_sdk() -> None:
    assert wire.finish_reason_to_proto(None) == gen.FINISH_REASON_UNSPECIFIED
    for reason in (FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.NO_TOKEN):
        assert wire.finish_reason_to_proto(reason) == gen.FINISH_REASON_UNSPECIFIED
    assert wire.finish_reason_from_proto(gen.FINISH_REASON_UNSPECIFIED) is None
    for value in gen.FinishReason.values():
        reason = wire.finish_reason_from_proto(value)
        assert FINISH_REASONS.get(value) == reason
        if value != gen.FINISH_REASON_UNSPECIFIED:
            assert wire.finish_reason_to_proto(reason) == value
