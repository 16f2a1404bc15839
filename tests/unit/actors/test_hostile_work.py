"""Work that no tier of ours sends, to real drafting tiers: whoever sends it loses its link, and others are answered as
before.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.admission import Address
from actors.tiers import DraftActor, LinkedActor, RetrievalActor
from actors.wire import work_batch_to_proto
from tests.random_models import random_pair
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core._gen.triforce.v1.tiers_pb2_grpc import TierStub
from triforce_core.config import Settings
from triforce_core.messages import Drafting, SamplingParams, SequenceSpec, Span, Work

AT_ONCE_S = 20.0  # seconds on a busy machine; the tiers answer in milliseconds
SPEC = SequenceSpec(SamplingParams(temperature=0.8), seed=3, prompt_length=4, max_length=100)


def honest(sequence_id: int = 7, **fields: Any) -> pb.Work:
    work = Work(Span(sequence_id, 0, (4, 5, 4, 5), SPEC), (4, 2), **fields)
    return work_batch_to_proto([work]).work[0]


class Peer:
    """The upper end of a link, by hand."""

    def __init__(self, address: Address) -> None:
        self.channel = grpc.insecure_channel(address.place)
        self.sent: queue.SimpleQueue[pb.WorkBatch | None] = queue.SimpleQueue()
        self.answers = TierStub(self.channel).Propose(
            iter(self.sent.get, None), timeout=AT_ONCE_S, metadata=address.metadata
        )

    def ask(self, *work: pb.Work, release: tuple[int, ...] = ()) -> pb.ProposalBatch:
        self.sent.put(pb.WorkBatch(work=work, release=release))
        return next(self.answers)  # type: ignore[no-any-return]

    def close(self) -> None:
        self.sent.put(None)
        self.answers.cancel()
        self.channel.close()


@pytest.fixture(scope="module", params=[DraftActor, RetrievalActor])
def tier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LinkedActor]:
    folder: Path = tmp_path_factory.mktemp("models")
    for name, model in zip(("target", "draft"), random_pair(), strict=True):
        model.save_pretrained(folder / name)
    made = Settings(
        dtype="float32",
        threads=1,
        target={"model": str(folder / "target"), "context_length": 200},
        draft={"model": str(folder / "draft"), "window": 64},
        max_sequences=2,
    )
    actor: LinkedActor = request.param(made)
    actor.start()
    yield actor
    actor.undo.close()


@pytest.fixture
def peers(tier: LinkedActor) -> Iterator[Callable[[], Peer]]:
    with ExitStack() as stack:

        def peer() -> Peer:
            assert tier.server is not None
            made = Peer(tier.server.address)
            stack.callback(made.close)
            return made

        yield peer


HOSTILE: dict[str, Callable[[pb.Work], object]] = {
    "a lookahead that never ends": lambda work: work.lookaheads.__setitem__(slice(None), [2**32 - 1] * 2),
    "no lookahead": lambda work: work.ClearField("lookaheads"),
    "a token beyond the vocabulary": lambda work: work.span.tokens.append(256),
    "a bias beyond the vocabulary": lambda work: work.span.spec.sampling.logit_bias.update({256: 1.0}),
    "a stop token beyond the vocabulary": lambda work: work.span.spec.stop_token_ids.append(256),
    "a text beyond the context": lambda work: work.span.tokens.extend([1] * 300),
}


@pytest.mark.parametrize("spoil", HOSTILE.values(), ids=HOSTILE)
def test_who_errs_loses_its_link_and_others_are_answered_at_once(
    peers: Callable[[], Peer], spoil: Callable[[pb.Work], object], caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = peers(), peers()
    before = good.ask(honest())
    work = honest(8, drafting=Drafting.BOTH)
    spoil(work)
    with pytest.raises(grpc.RpcError) as refusal:
        bad.ask(work)
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert [each.tokens for each in good.ask(honest()).proposals] == [each.tokens for each in before.proposals]
    assert "a round failed" not in caplog.text


tokens = st.lists(st.integers(0, 255), max_size=60).map(tuple)
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.8, 100.0]),
    top_k=st.sampled_from([0, 1, 2**31 - 1]),
    top_p=st.sampled_from([1e-300, 1.0]),
    repetition_penalty=st.sampled_from([0.01, 1.0, 100.0]),
    frequency_penalty=st.sampled_from([0.0, 2.0]),
    min_tokens=st.sampled_from([0, 2**31 - 1]),
    logit_bias=st.dictionaries(st.integers(0, 255), st.sampled_from([-100.0, 100.0]), max_size=3).map(
        lambda biases: tuple(biases.items())
    ),
    bad_word_ids=st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
)
specs = st.builds(
    SequenceSpec,
    samplings,
    st.integers(-(2**63), 2**63 - 1),
    prompt_length=st.integers(1, 60),
    max_length=st.integers(60, 200),
    stop_token_ids=tokens,
    grammar=st.sampled_from(["", "{", "[0-9]"]),
)
spans = st.builds(Span, st.integers(0, 4), st.sampled_from([0, 1, 5, 60, 140]), tokens, specs)
lookaheads = st.lists(st.sampled_from([0, 1, 2, 7, 128]), min_size=1, max_size=3).map(tuple)
works = st.builds(Work, spans, lookaheads, st.booleans(), st.sampled_from(Drafting))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(work=st.lists(works, max_size=4), released=st.lists(st.integers(0, 5), max_size=3))
def test_no_work_within_bounds_ends_a_round(
    peers: Callable[[], Peer], caplog: pytest.LogCaptureFixture, work: list[Work], released: list[int]
) -> None:
    peer = peers()
    peer.sent.put(work_batch_to_proto(work, released))
    until = time.monotonic() + AT_ONCE_S
    while not any(each.sequence_id == 7 for each in peer.ask(honest()).proposals):
        assert time.monotonic() < until
    peer.close()
    assert "a round failed" not in caplog.text, caplog.text
