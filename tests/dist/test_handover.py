"""The hand-over between real actors: pieces that are damaged or lost change no token, and are asked for again."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from actors.handover import Piece, cut_pieces
from actors.links import RemoteProposer
from actors.tiers import RetrievalActor
from actors.wire import sampling_to_proto
from tests.conftest import HeldOut
from tests.dist.conftest import StartPipeline
from tests.dist.decoding import Decoded, Tiers
from triforce_core._gen.triforce.v1 import generation_pb2 as gen
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import Settings, load_settings
from triforce_core.kv.snapshot import Snapshot
from triforce_core.messages import SamplingParams, Tier


def settings(**retrieval: Any) -> Settings:
    """With these settings many snapshots are sent."""
    own = {"budget": 256, "refresh_every": 8}
    return load_settings(dtype="float32", max_sequences=2, retrieval=own | retrieval)


def decode(tiers: Tiers, prompt: tuple[int, ...], lookaheads: tuple[int, int] = (8, 3)) -> Decoded:
    request = pb.DecodeRequest(
        prompt_token_ids=prompt,
        sampling=sampling_to_proto(SamplingParams(0.8)),
        seed=3,
        max_tokens=160,
        lookaheads=gen.Lookaheads(values=lookaheads),
    )
    [decoded] = tiers.decode(request)
    return decoded


def on(tiers: Tiers, tier: Tier, call: Callable[[Any], Any]) -> Any:
    """Run something in a tier's process, with its actor."""
    import ray

    return ray.get(tiers.pipeline.actors.all()[tier].__ray_call__.remote(call), timeout=30)


def cut_small(actor: Any) -> None:
    """Let pieces be so small that a whole snapshot has eight or so."""
    actor.sink.piece_bytes = 2**19


def record_answers(actor: Any) -> None:
    """Record what the retrieval tier answers to each piece that it is given."""
    take = actor.snapshots.take_piece
    actor.answers = []

    def take_recorded(piece: Piece) -> bool | None:
        answer: bool | None = take(piece)
        actor.answers.append((piece.manifest.sequence_id, piece.manifest.version, answer))
        return answer

    actor.snapshots.take_piece = take_recorded


class Sent(NamedTuple):
    delivered: int  # snapshots
    failed: int  # snapshots of which no piece was answered with True: refused, or never whole
    pieces: int


def sent(tiers: Tiers) -> Sent:
    """What was sent since the last call, as the retrieval tier saw it."""

    def take(actor: Any) -> list[tuple[int, int, bool | None]]:
        taken: list[tuple[int, int, bool | None]] = actor.answers[:]
        actor.answers.clear()
        return taken

    tiers.wait_idle()
    answers = on(tiers, Tier.RETRIEVAL, take)
    begun = {(sequence_id, version) for sequence_id, version, _ in answers}
    whole = {(sequence_id, version) for sequence_id, version, answer in answers if answer}
    return Sent(len(whole), len(begun - whole), len(answers))


def damage_pieces(actor: Any) -> None:
    """Change one bit of every eleventh piece."""
    put, turns = actor.sink.put, itertools.count(1)

    def put_damaged(piece: Piece) -> Any:
        if next(turns) % 11 == 0:
            data = piece.data.copy()  # type: ignore[union-attr]
            data[len(data) // 2] ^= 1
            piece = replace(piece, data=data)
        return put(piece)

    actor.sink.put = put_damaged


def lose_pieces(actor: Any) -> None:
    """Never send the second piece of every third snapshot."""
    pieces, turns = actor.sink.pieces, itertools.count(1)

    def fewer(snapshot: Snapshot) -> Iterator[Piece]:
        whole = list(pieces(snapshot))
        yield from whole[:1] + whole[2:] if next(turns) % 3 == 0 else whole

    actor.sink.pieces = fewer


def mend(actor: Any) -> None:
    for name in ("put", "pieces"):
        actor.sink.__dict__.pop(name, None)


@pytest.mark.ci
def test_damaged_and_lost_pieces_change_no_token(start_pipeline: StartPipeline, held_out: HeldOut) -> None:
    prompt = held_out("inspect.py", 900)
    with start_pipeline(settings()) as (runner, pipeline):
        tiers = Tiers(pipeline, runner.run)
        on(tiers, Tier.TARGET, cut_small)
        expected = decode(tiers, prompt, (0, 0)).tokens
        on(tiers, Tier.RETRIEVAL, record_answers)
        assert decode(tiers, prompt).tokens == expected
        undisturbed = sent(tiers)
        assert undisturbed.failed <= 1, "the last one, which came after the request's end"
        assert undisturbed.delivered >= 6
        assert undisturbed.pieces > 2 * undisturbed.delivered
        for fault in (damage_pieces, lose_pieces):
            on(tiers, Tier.TARGET, fault)
            found = decode(tiers, prompt)
            assert found.tokens == expected, fault.__name__
            disturbed = sent(tiers)
            on(tiers, Tier.TARGET, mend)
            assert disturbed.failed >= 2
            assert disturbed.delivered >= 2, "asked for again"
            assert int(Tier.RETRIEVAL) in found.origins, "and put to use"
        assert decode(tiers, prompt).tokens == expected
        assert sent(tiers).failed <= 1


def test_nothing_is_left_of_a_target_that_ends_while_it_sends() -> None:
    """When the target ends, it has stated none of three sequences. The retrieval tier has a whole snapshot of the
    first, one piece of a snapshot of the second, and nothing of the third.
    """
    actor = RetrievalActor(settings())
    actor.start()
    link = again = other = None
    try:
        assert actor.snapshots is not None
        kv: Any = actor.snapshots.taker
        geometry = kv.geometry
        nothing = torch.zeros(geometry.num_layers, geometry.num_kv_heads, 8, geometry.head_dim)
        whole, begun, late = (list(cut_pieces(Snapshot(i, 1, 8, nothing, nothing), 2**12)) for i in (1, 2, 3))
        assert actor.take_piece(whole[0]) is False, "nobody has linked yet"
        link = RemoteProposer(actor.start, timeout_s=30.0)
        assert link.wait_ready(30.0)
        assert [actor.take_piece(piece) for piece in whole][-1] is True
        assert actor.take_piece(begun[0]) is None
        assert (list(kv.arrived), list(actor.snapshots.assemblies)) == ([1], [2])
        link.close()
        until = time.monotonic() + 30
        while kv.arrived or actor.snapshots.assemblies:
            assert time.monotonic() < until
            time.sleep(0.01)
        for pieces in (begun, late):
            assert actor.take_piece(pieces[1]) is False
        assert not actor.snapshots.assemblies
        again = RemoteProposer(actor.start, timeout_s=30.0)
        assert again.wait_ready(30.0)
        assert [actor.take_piece(piece) for piece in late][-1] is True
        # A target that has linked again before its old link is seen to end loses nothing.
        other = RemoteProposer(actor.start, timeout_s=30.0)
        assert other.wait_ready(30.0)
        again.close()
        while len(actor.tier_server.links) > 1 or not actor.tier_server.inbox.empty():
            assert time.monotonic() < until
            time.sleep(0.01)
        time.sleep(0.1)  # the worker has taken the end of the link, and may still be at it
        assert list(kv.arrived) == [3]
    finally:
        for each in filter(None, (link, again, other)):
            each.close()
        assert actor.server is not None
        actor.server.stop()
        actor.undo.close()


def test_ray_direct_transport(start_pipeline: StartPipeline, held_out: HeldOut) -> None:
    """Pieces travel by NIXL, which can move host memory, too. If the retrieval tier dies, the target lives on."""
    pytest.importorskip("nixl", reason="NIXL is not installed")
    import ray

    prompt = held_out("inspect.py", 900)
    with start_pipeline(settings(transport="rdt")) as (runner, pipeline):
        tiers = Tiers(pipeline, runner.run)
        on(tiers, Tier.TARGET, cut_small)
        expected = decode(tiers, prompt, (0, 0)).tokens
        decode(tiers, prompt)  # the first transfer sets NIXL up
        on(tiers, Tier.RETRIEVAL, record_answers)
        assert decode(tiers, prompt).tokens == expected
        undisturbed = sent(tiers)
        assert undisturbed.delivered >= 6
        assert undisturbed.failed <= 1
        ray.kill(pipeline.actors.retrieval, no_restart=False)
        until = time.monotonic() + 60
        while True:
            found = decode(tiers, prompt)
            assert found.tokens == expected
            if int(Tier.RETRIEVAL) in found.origins:
                break
            assert time.monotonic() < until, "the retrieval tier does not come back"
