"""A check of the full cache's bookkeeping: every slot is free, in one sequence's own range, or in one node of the tree.

It walks everything, so it is for tests and for the search for a defect.
"""

from __future__ import annotations

from triforce_core.kv.full import FullKV
from triforce_core.kv.prefix_tree import Node
from triforce_core.kv.ranges import Range, united
from triforce_core.kv.text_slots import MOST_RANGES


def slots_of(ranges: list[Range]) -> list[int]:
    """Each slot in the ranges."""
    return [slot for start, stop in ranges for slot in range(start, stop)]


def check(kv: FullKV) -> None:
    """Raise `AssertionError` if a slot is lost or owned twice, or if the tree and the sequences disagree."""
    own = [each for held in kv.held.values() for each in held.own_ranges]
    nodes = [*kv.tree.nodes()]
    slots = [*kv.allocator.free_ranges, *own, *(node.slots for node in nodes if node.tokens)]
    assert united(slots) == united([(0, kv.allocator.num_slots)] * bool(kv.allocator.num_slots)), "a slot is lost"
    for node in nodes:
        check_node(kv, node)
    idle = sum(len(node.tokens) for node in nodes if not node.users)
    assert idle == kv.tree.idle_tokens, f"{kv.tree.idle_tokens} tokens are said to be idle, {idle} are"
    users = dict.fromkeys(nodes, 0)
    for held in kv.held.values():
        used = held.node
        while used is not None and used is not kv.tree.root:
            users[used] += 1  # a dropped node raises KeyError here
            used = used.parent
    for node, count in users.items():
        assert node.users == count, f"node {node.serial} has {node.users} users for {count} sequences"
    for sequence_id in kv.held:
        check_sequence(kv, sequence_id)
    ends = {held.ranges[-1][1] for held in kv.held.values()}
    assert kv.allocator.wishes.keys() <= ends, "the wish of nobody"


def check_node(kv: FullKV, node: Node) -> None:
    unit = kv.tree.unit
    assert node.alive
    assert node.parent is not None
    assert node.parent.children[node.key] is node
    assert node.start == node.parent.stop
    assert node.users >= sum(child.users for child in node.children.values())
    assert len(node.tokens) == node.slots[1] - node.slots[0]
    assert node.start % unit == node.slots[0] % unit == len(node.tokens) % unit == 0, "whole chunks at aligned slots"
    if node.tokens:
        assert node.key == tuple(node.tokens[:unit])


def check_sequence(kv: FullKV, sequence_id: int) -> None:
    """Check that the slots which a sequence shares with the tree are in the tree, at the positions of its text."""
    held = kv.held[sequence_id]
    assert len(held.ranges) <= MOST_RANGES
    assert all(each % kv.allocator.unit == 0 for bounds in held.ranges for each in bounds)
    if held.node is None:
        return
    path = kv.tree.path(held.node)
    text = [token for node in path for token in node.tokens]
    assert text == held.tokens[: len(text)], f"sequence {sequence_id} uses another text than its own"
    slots = slots_of([node.slots for node in path])
    own = slots_of(held.ranges)
    for start, stop in held.given:
        assert stop <= len(text)
        assert own[start:stop] == slots[start:stop], f"sequence {sequence_id} sees other slots than those of its text"
