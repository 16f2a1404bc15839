"""Snapshots of a model whose KV heads are divided over ranks in order: rank 0 holds the first heads, and so on.

`join` makes one snapshot of the snapshots that the ranks cut; `split` divides a snapshot into the ranks' shares.
"""

from dataclasses import replace

import torch

from triforce_core.errors import require
from triforce_core.kv.snapshot import Changes, Snapshot


def join(parts: list[Snapshot]) -> Snapshot:
    """One snapshot from the ranks' shares `parts`, in rank order. All shares are equal except for their KV."""
    keys, values = (torch.cat([part.tensors[i] for part in parts], dim=1) for i in (0, 1))
    changes = [part.changes for part in parts if part.changes is not None]
    joined = _joined(changes, parts[0].keys.shape[1]) if changes else None
    return replace(parts[0], keys=keys, values=values, changes=joined)


def split(snapshot: Snapshot, world: int) -> list[Snapshot]:
    """The ranks' shares of the snapshot, in rank order; their keys and values are views of the snapshot's."""
    kv_heads = snapshot.keys.shape[1]
    require(kv_heads % world == 0, "snapshot", kv_heads, f"KV heads must divide by {world} ranks")
    keys, values = snapshot.keys.chunk(world, dim=1), snapshot.values.chunk(world, dim=1)
    changes = [None] * world if snapshot.changes is None else _divided(snapshot.changes, kv_heads, world)
    return [replace(snapshot, keys=k, values=v, changes=c) for k, v, c in zip(keys, values, changes, strict=True)]


def _joined(parts: list[Changes], kv_heads: int) -> Changes:
    """The changes of all ranks, of `kv_heads` each, as one: numbered by all KV heads and sorted again."""
    found = []
    for rank, changes in enumerate(parts):
        layers, heads, places = changes.places.unbind(1)
        found.append(torch.stack([layers, rank * kv_heads + heads, places], dim=1))
    places = torch.cat(found)
    order = places[:, 0].argsort(stable=True)  # within a layer, ranks' heads are in rank order
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
