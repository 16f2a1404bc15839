"""The hand-over between real actors: pieces that are damaged or lost change no token, and are asked for again."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from actors.handover import HandoverCounters, Piece
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
    """Pieces so small that a whole snapshot has eight or so, and many snapshots."""
    own = {"budget": 256, "refresh_every": 8, "recent": 32, "piece_bytes": 2**19}
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


def on_target(tiers: Tiers, call: Callable[[Any], Any]) -> Any:
    """Run something in the target's process, with its actor."""
    import ray

    return ray.get(tiers.pipeline.actors.all()[Tier.TARGET].__ray_call__.remote(call), timeout=30)


def counters(tiers: Tiers) -> HandoverCounters:
    """Of what has been sent since the last call."""

    def take(actor: Any) -> HandoverCounters:
        taken: HandoverCounters = actor.sink.counters
        actor.sink.counters = HandoverCounters()
        return taken

    tiers.wait_idle()
    found: HandoverCounters = on_target(tiers, take)
    return found


def damage_pieces(actor: Any) -> None:
    """Every eleventh piece has one bit wrong."""
    put, turns = actor.sink.put, itertools.count(1)

    def put_damaged(piece: Piece) -> Any:
        if next(turns) % 11 == 0:
            data = piece.data.copy()  # type: ignore[union-attr]
            data[len(data) // 2] ^= 1
            piece = replace(piece, data=data)
        return put(piece)

    actor.sink.put = put_damaged


def lose_pieces(actor: Any) -> None:
    """Of every third snapshot the second piece is never sent, or the only one."""
    pieces, turns = actor.sink.pieces, itertools.count(1)

    def fewer(snapshot: Snapshot) -> Iterator[Piece]:
        whole = list(pieces(snapshot))
        yield from whole[:1] + whole[2:] if next(turns) % 3 == 0 else whole

    actor.sink.pieces = fewer


def mend(actor: Any) -> None:
    for name in ("put", "pieces"):
        actor.sink.__dict__.pop(name, None)


def test_damaged_and_lost_pieces_change_no_token(start_pipeline: StartPipeline, held_out: HeldOut) -> None:
    prompt = held_out("inspect.py", 900)
    with start_pipeline(settings()) as (runner, pipeline):
        tiers = Tiers(pipeline, runner.run)
        expected = decode(tiers, prompt, (0, 0)).tokens
        assert counters(tiers) == HandoverCounters()
        assert decode(tiers, prompt).tokens == expected
        undisturbed = counters(tiers)
        assert undisturbed.failed <= 1, "the last one, which came after the request's end"
        assert undisturbed.delivered >= 6
        assert undisturbed.pieces > 2 * undisturbed.delivered
        for fault in (damage_pieces, lose_pieces):
            on_target(tiers, fault)
            found = decode(tiers, prompt)
            assert found.tokens == expected, fault.__name__
            disturbed = counters(tiers)
            on_target(tiers, mend)
            assert disturbed.failed >= 2
            assert disturbed.delivered >= 2, "asked for again"
            assert int(Tier.RETRIEVAL) in found.origins, "and put to use"
        assert decode(tiers, prompt).tokens == expected
        assert counters(tiers).failed <= 1


def test_ray_direct_transport(start_pipeline: StartPipeline, held_out: HeldOut) -> None:
    """By NIXL, which also moves host memory; a retrieval tier that dies takes nobody with it."""
    pytest.importorskip("nixl", reason="NIXL is not installed")
    import ray

    prompt = held_out("inspect.py", 900)
    with start_pipeline(settings(transport="rdt")) as (runner, pipeline):
        tiers = Tiers(pipeline, runner.run)
        expected = decode(tiers, prompt, (0, 0)).tokens
        decode(tiers, prompt)  # the first transfer sets NIXL up
        counters(tiers)
        assert decode(tiers, prompt).tokens == expected
        sent = counters(tiers)
        assert sent.delivered >= 6
        assert sent.failed <= 1
        ray.kill(pipeline.actors.retrieval, no_restart=False)
        until = time.monotonic() + 60
        while True:
            found = decode(tiers, prompt)
            assert found.tokens == expected
            if int(Tier.RETRIEVAL) in found.origins:
                break
            assert time.monotonic() < until, "the retrieval tier does not come back"
