"""Snapshots of a model whose KV heads are divided over ranks: rank r of n holds the r-th n-th of them, in order.

`join` makes one snapshot of what every rank cut, `split` gives every rank its share of one. Pure functions.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from triforce_core.errors import require
from triforce_core.kv.snapshot import Changes, Snapshot


def join(parts: list[Snapshot]) -> Snapshot:
    """The whole of which `parts` are the ranks' shares, by rank. What is not KV is the same in all of them."""
    keys, values = (torch.cat([part.tensors[i] for part in parts], dim=1) for i in (0, 1))
    changes = [part.changes for part in parts if part.changes is not None]
    joined = _joined(changes, parts[0].keys.shape[1]) if changes else None
    return replace(parts[0], keys=keys, values=values, changes=joined)


def split(snapshot: Snapshot, world: int) -> list[Snapshot]:
    """Each rank's share, by rank; its keys and values are views of the snapshot's."""
    kv_heads = snapshot.keys.shape[1]
    require(kv_heads % world == 0, "snapshot", kv_heads, f"KV heads must divide by {world} ranks")
    keys, values = snapshot.keys.chunk(world, dim=1), snapshot.values.chunk(world, dim=1)
    changes = [None] * world if snapshot.changes is None else _divided(snapshot.changes, kv_heads, world)
    return [replace(snapshot, keys=k, values=v, changes=c) for k, v, c in zip(keys, values, changes, strict=True)]


def _joined(parts: list[Changes], kv_heads: int) -> Changes:
    """Of ranks with `kv_heads` each: their places among all KV heads, in order again."""
    found = []
    for rank, changes in enumerate(parts):
        layers, heads, places = changes.places.unbind(1)
        found.append(torch.stack([layers, rank * kv_heads + heads, places], dim=1))
    places = torch.cat(found)
    order = places[:, 0].argsort(stable=True)  # within a layer, a rank's heads follow those of the rank before
    keys, values = (torch.cat([changes.keys for changes in parts]), torch.cat([changes.values for changes in parts]))
    return replace(parts[0], places=places[order], keys=keys[order], values=values[order])


def _divided(changes: Changes, kv_heads: int, world: int) -> list[Changes]:
    share = kv_heads // world
    layers, heads, places = changes.places.unbind(1)
    divided = []
    for rank in range(world):
        mine = heads // share == rank
        own = torch.stack([layers, heads - rank * share, places], dim=1)[mine]
        divided.append(replace(changes, places=own, keys=changes.keys[mine], values=changes.values[mine]))
    return divided
