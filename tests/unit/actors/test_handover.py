"""Snapshots in checked pieces: whatever becomes of pieces on the way, a snapshot is installed whole or not at all."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from actors.handover import (
    MAX_SENDING,
    ROW_BYTES,
    Piece,
    RaySink,
    SnapshotReceiver,
    checksum,
    cut_pieces,
    sink_for,
)
from tests.stating import num_bytes
from triforce_core.config import RetrievalSettings
from triforce_core.errors import InvalidValueError
from triforce_core.kv.snapshot import Changes, Snapshot


class Taker:
    """Takes snapshots as the retrieval tier's cache does: in order of versions, changes to the latest only."""

    def __init__(self) -> None:
        self.taken: list[Snapshot] = []
        self.released: set[int] = set()

    def is_live(self, sequence_id: int) -> bool:
        return sequence_id not in self.released

    @property
    def held(self) -> set[int]:
        return set()

    def drop_unstated(self) -> None:
        self.taken.clear()

    def take(self, snapshot: Snapshot) -> bool:
        if snapshot.changes and snapshot.changes.base != self.confirmed(snapshot.sequence_id):
            return False
        self.taken.append(snapshot)
        return True

    def confirmed(self, sequence_id: int) -> int:
        return max((s.version for s in self.taken if s.sequence_id == sequence_id), default=0)


@pytest.fixture
def taker() -> Taker:
    return Taker()


@pytest.fixture
def receiver(taker: Taker) -> SnapshotReceiver:
    return SnapshotReceiver(taker, "cpu", max_sequences=3)


def snapshot_of(
    version: int, *, sequence_id: int = 1, base: int = 0, dtype: torch.dtype = torch.bfloat16, replaced: int = 5
) -> Snapshot:
    generator = torch.Generator().manual_seed(version)

    def kv(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).to(dtype)

    changes = None
    if base:
        places = torch.arange(3 * replaced, dtype=torch.int32).reshape(replaced, 3)
        changes = Changes(base, 16, places, kv(replaced, 4, 8), kv(replaced, 4, 8))
    return Snapshot(sequence_id, version, 50, kv(2, 3, 9, 8), kv(2, 3, 9, 8), changes)


def assert_equal(found: Snapshot, expected: Snapshot) -> None:
    header = ("sequence_id", "version", "position", "num_tokens", "record")
    assert [getattr(found, name) for name in header] == [getattr(expected, name) for name in header]
    for ours, theirs in zip(found.tensors, expected.tensors, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def damaged(piece: Piece, rng: random.Random) -> Piece:
    """The piece with one bit changed, with a wrong description, or without its last byte."""
    assert isinstance(piece.data, np.ndarray)
    kind = rng.choice(["bit", "index", "first", "version", "position", "short"])
    if kind == "bit":
        data = piece.data.copy()
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return replace(piece, data=data)
    if kind == "short":
        return replace(piece, data=piece.data[:-1])
    if kind in ("version", "position"):
        return replace(piece, manifest=replace(piece.manifest, **{kind: getattr(piece.manifest, kind) + 1}))
    return replace(piece, **{kind: getattr(piece, kind) + 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("piece_bytes", [7, 100, 10**6])
@pytest.mark.parametrize("replaced", [0, 5])
def test_pieces_in_any_order_make_the_snapshot(
    receiver: SnapshotReceiver, taker: Taker, dtype: torch.dtype, piece_bytes: int, replaced: int
) -> None:
    rng = random.Random(piece_bytes)
    for version in (1, 2, 3):
        snapshot = snapshot_of(version, base=version - 1, dtype=dtype, replaced=replaced)
        pieces = list(cut_pieces(snapshot, piece_bytes))
        assert sum(len(piece.data) for piece in pieces) == num_bytes(snapshot)
        assert max(len(piece.data) for piece in pieces) <= piece_bytes
        shuffled = rng.sample(pieces, len(pieces))
        repeated = [p for piece in shuffled[:-1] for p in [piece] * rng.choice([1, 1, 2])] + shuffled[-1:]
        answers = [receiver.take_piece(piece) for piece in repeated]
        assert answers == [None] * (len(repeated) - 1) + [True]
        assert_equal(taker.taken[-1], snapshot)
        assert all(receiver.take_piece(piece) for piece in rng.choices(pieces, k=3)), "it is here already"
    assert len(taker.taken) == 3
    assert not receiver.assemblies


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_piece_loses_its_version(receiver: SnapshotReceiver, taker: Taker, seed: int) -> None:
    rng = random.Random(seed)
    pieces = list(cut_pieces(snapshot_of(1), 100))
    bad = rng.randrange(len(pieces))
    answers = [receiver.take_piece(damaged(p, rng) if i == bad else p) for i, p in enumerate(pieces)]
    assert answers[bad] is False
    assert True not in answers
    assert not taker.taken
    again = snapshot_of(2)
    assert [receiver.take_piece(piece) for piece in cut_pieces(again, 100)][-1] is True
    assert_equal(taker.taken[-1], again)


def test_a_missing_piece_holds_up_its_version_only(receiver: SnapshotReceiver, taker: Taker) -> None:
    pieces = list(cut_pieces(snapshot_of(1), 100))
    assert {receiver.take_piece(piece) for piece in pieces[:-1]} == {None}
    newer = list(cut_pieces(snapshot_of(2), 100))
    assert receiver.take_piece(newer[0]) is None
    assert receiver.take_piece(pieces[-1]) is False, "the newer version has taken its place"
    assert [receiver.take_piece(piece) for piece in newer[1:]][-1] is True
    assert [s.version for s in taker.taken] == [2]
    assert receiver.take_piece(pieces[-1]) is False, "an older version than the one here"


def test_changes_whose_base_is_not_here_are_refused(receiver: SnapshotReceiver, taker: Taker) -> None:
    changes = snapshot_of(2, base=1)
    assert [receiver.take_piece(piece) for piece in cut_pieces(changes, 10**6)][-1] is False
    assert not receiver.assemblies
    for snapshot in (snapshot_of(1), changes):
        assert [receiver.take_piece(piece) for piece in cut_pieces(snapshot, 10**6)][-1] is True
    restarted = SnapshotReceiver(Taker(), "cpu", 3)
    assert [restarted.take_piece(piece) for piece in cut_pieces(snapshot_of(3, base=2), 10**6)][-1] is False


def test_what_is_never_completed_does_not_pile_up(receiver: SnapshotReceiver) -> None:
    for sequence_id in range(1, 50):
        first = next(iter(cut_pieces(snapshot_of(1, sequence_id=sequence_id), 100)))
        assert receiver.take_piece(first) is None
    assert len(receiver.assemblies) == 3


def test_what_is_there_of_a_sequence_that_is_over_goes(receiver: SnapshotReceiver, taker: Taker) -> None:
    """Its sender may have given it up, or may still send it. The answer to the first piece then says that nobody wants
    it.
    """
    over, other = (list(cut_pieces(snapshot_of(1, sequence_id=i), 100)) for i in (1, 2))
    assert receiver.take_piece(over[0]) is None
    taker.released.add(1)
    assert receiver.take_piece(other[0]) is None
    assert list(receiver.assemblies) == [2]
    assert {receiver.take_piece(piece) for piece in over} == {False}
    assert list(receiver.assemblies) == [2]
    taker.released.clear()  # stated again, as after a link that was lost
    assert [receiver.take_piece(piece) for piece in over][-1] is True


def test_pieces_are_cut_one_at_a_time() -> None:
    """A snapshot on a device is never copied to the host as a whole: each piece is made only when the piece before it
    has been taken.
    """
    snapshot = snapshot_of(1)
    pieces: Iterator[Piece] = cut_pieces(snapshot, 100)
    next(pieces)
    snapshot.values.fill_(7)
    assert any(np.all(p.data.view(np.uint16) == p.data.view(np.uint16)[0]) for p in pieces)  # type: ignore[union-attr]


@pytest.mark.parametrize("size", [8, ROW_BYTES, 5 * ROW_BYTES, 5 * ROW_BYTES + 13])
def test_a_checksum_knows_each_bit_and_each_place(size: int) -> None:
    """It notices also if bytes change places, within a row of its table or between rows."""
    rng = random.Random(size)
    data = np.frombuffer(rng.randbytes(size), dtype=np.uint8)
    sound = checksum(data, (1,))
    assert checksum(data.copy(), (1,)) == sound
    assert checksum(data, (2,)) != sound
    assert checksum(data[:-1], (1,)) != sound
    for _ in range(200):
        wrong = data.copy()
        wrong[rng.randrange(size)] ^= 1 << rng.randrange(8)
        assert checksum(wrong, (1,)) != sound
        wrong, one, other = data.copy(), rng.randrange(size), rng.randrange(size)
        wrong[[one, other]] = wrong[[other, one]]
        assert (checksum(wrong, (1,)) == sound) == (data[one] == data[other])


def test_a_transport_that_is_not_installed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidValueError, match=r"retrieval\.transport: 'rdt' needs NIXL"):
        sink_for(RetrievalSettings(transport="rdt"), None)  # type: ignore[arg-type]
    sink_for(RetrievalSettings(), None)  # type: ignore[arg-type]


class GatedSink(RaySink):
    """Sends snapshots while the gate is open, and notes whose they were."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.gate, self.sent = threading.Event(), list[int]()

    def _send_pieces(self, snapshot: Snapshot) -> bool:
        self.gate.wait(30)
        self.sent.append(snapshot.sequence_id)
        return True


def test_only_so_many_snapshots_are_held_and_none_is_lost() -> None:
    sink = GatedSink()
    try:
        for sequence_id in range(MAX_SENDING):
            assert not sink.busy(sequence_id)
            sink.deliver(snapshot_of(1, sequence_id=sequence_id))
            assert sink.busy(sequence_id)
        assert sink.busy(MAX_SENDING), "no room for one more"
    finally:
        sink.gate.set()
    sink.executor.shutdown()
    assert not sink.busy(0)
    assert not sink.busy(MAX_SENDING)
    assert sink.sent == list(range(MAX_SENDING))
    assert [sink.confirmed(i) for i in sink.sent] == [1] * MAX_SENDING


@pytest.mark.parametrize("piece_bytes", [100, 10**6])
def test_pieces_as_tensors(receiver: SnapshotReceiver, taker: Taker, piece_bytes: int) -> None:
    """RDT carries pieces in this form. Their check is the same."""
    snapshot = snapshot_of(1)
    pieces = list(cut_pieces(snapshot, piece_bytes, on_device=True))
    wrong = replace(pieces[0], data=pieces[0].data ^ 1)  # type: ignore[operator]
    assert receiver.take_piece(wrong) is False
    assert [receiver.take_piece(piece) for piece in pieces][-1] is True
    assert_equal(taker.taken[-1], snapshot)
