"""Which texts the pool holds KV of, as a radix tree: a node is a run of tokens, whole chunks, and the range of slots
with their KV, and texts that begin alike share nodes. Plain integers, no tensors. It depends only on the calls made on
it, never on a clock, so that all ranks do the same. docs/decisions/0024-shared-documents.md
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from triforce_core.kv.ranges import Range, sliced
from triforce_core.messages import agreement

Key = tuple[int, ...] | str  # the first chunk of a node's tokens; of a node directly below the root, the salt


@dataclass(eq=False, slots=True)
class Node:
    """The KV of `tokens`, which follow the text of the nodes above. The nodes directly below the root stand for the
    salts of requests and hold no tokens.
    """

    parent: Node | None
    key: Key  # among the parent's children
    start: int  # position of the first token
    tokens: list[int]
    slots: Range
    serial: int  # in the order in which nodes were made
    used: int  # the value of `PrefixTree.calls` at its last use
    users: int = 0  # sequences that use this node or one below it
    alive: bool = True  # False: dropped
    children: dict[Key, Node] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(eq=False, slots=True)
class Cursor:
    """How much of a text's beginning the tree holds, kept while it waits: each look compares only what is new."""

    salt: str
    text: list[int]
    most: int  # tokens that may be matched, whole chunks
    node: Node | None = None  # the last one that the text agrees with, at least in part
    depth: int = 0  # tokens that agree, whole chunks
    version: int = -1  # of the tree


class PrefixTree:
    """`free` gives slots of dropped nodes back to the pool."""

    def __init__(self, unit: int, free: Callable[[list[Range]], None]) -> None:
        self.unit, self.free = unit, free
        self.calls = self.num_nodes = self.version = 0
        self.idle_tokens = 0  # in nodes that no sequence uses
        self.dropped_tokens = 0  # so far
        self.root = Node(None, "", 0, [], (0, 0), 0, 0)

    # -- reading: the tree does not change, so one rank may do this without the others ---------------------------------

    def advance(self, cursor: Cursor) -> int:
        """Bring the cursor up to the present tree; returns its depth."""
        if cursor.version == self.version:
            return cursor.depth
        node, depth, text = cursor.node or self.root, cursor.depth, cursor.text
        while node.parent is not None and (not node.alive or depth <= node.start):
            if not node.alive:
                depth = min(depth, node.start)
            node = node.parent
        if node is self.root:
            depth, node = 0, self.root.children.get(cursor.salt, self.root)
        while node is not self.root:
            if depth < node.stop:
                most = min(node.stop, cursor.most) - depth
                depth += self._whole(agreement(node.tokens, depth - node.start, text, depth, most))
            if depth < node.stop or depth == cursor.most or not (below := self._below(node, text)):
                break
            node = below
        cursor.node, cursor.depth, cursor.version = node, depth, self.version
        return depth

    def path(self, node: Node) -> list[Node]:
        """The nodes with tokens from the first one to this one."""
        nodes = []
        above: Node | None = node
        while above is not None and above.tokens:
            nodes.append(above)
            above = above.parent
        return nodes[::-1]

    def ranges(self, node: Node | None, depth: int) -> list[Range]:
        """The slots of the first `depth` tokens of the text that ends with this node."""
        return [] if node is None else sliced([each.slots for each in self.path(node)], 0, depth)

    def nodes(self) -> Iterator[Node]:
        """All nodes except the root."""
        waiting = [*self.root.children.values()]
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            yield node

    def idle_ranges(self, spared: Node | None = None, depth: int = 0) -> list[Range]:
        """The slots of unused nodes, without the first `depth` tokens of the text that ends with `spared`."""
        path = [] if spared is None else [node for node in self.path(spared) if node.start < depth]
        kept = {node.serial: min(node.stop, depth) - node.start for node in path}
        idle = [(node.slots[0] + kept.get(node.serial, 0), node.slots[1]) for node in self.nodes() if not node.users]
        return [each for each in idle if each[0] < each[1]]

    # -- use -----------------------------------------------------------------------------------------------------------

    def enter(self, salt: str, node: Node | None = None, depth: int = 0) -> Node:
        """A sequence uses the first `depth` tokens, whole chunks, of the text to `node`; returns where they end."""
        self.calls += 1
        while node is not None and node.parent is not None and node.start >= depth:
            node = node.parent
        if not depth or node is None:
            node = self.root.children.get(salt) or self._add(self.root, salt, [], (0, 0))
        elif depth < node.stop:
            node = self._split(node, depth)
        above: Node | None = node
        while above is not None:
            self._use(above)
            above = above.parent
        return node

    def leave(self, node: Node) -> None:
        """A sequence uses this node no longer."""
        self.calls += 1
        above: Node | None = node
        while above is not None:
            above.users -= 1
            above.used = self.calls
            if not above.users:
                self.idle_tokens += len(above.tokens)
            above = above.parent
        if not (node.tokens or node.users or node.children):
            self.drop(node)

    def insert(self, node: Node, text: list[int], stop: int, ranges: list[Range]) -> tuple[Node, list[Range]]:
        """Take over what the tree lacks of the text of the sequence that uses `node`, up to `stop`, the end of a whole
        chunk. From then on the sequence uses the node that ends there.

        `ranges`: the slots of the whole text. Returns that node, and the positions whose slots are now the tree's.
        """
        self.calls += 1
        given: list[Range] = []
        while node.stop < stop:
            if known := self._below(node, text):
                most = min(len(known.tokens), stop - known.start)
                agreed = self._whole(agreement(known.tokens, 0, text, known.start, most))
                node = known if agreed == len(known.tokens) else self._split(known, known.start + agreed)
                self._use(node)
            else:
                given.append((node.stop, stop))
                for piece in sliced(ranges, node.stop, stop):
                    node = self._append(node, text[node.stop : node.stop + piece[1] - piece[0]], piece)
        return node, given

    def _append(self, node: Node, tokens: list[int], slots: Range) -> Node:
        self.version += 1
        if node.users == 1 and not node.children and node.tokens and node.slots[1] == slots[0]:
            node.tokens, node.slots = node.tokens + tokens, (node.slots[0], slots[1])
            return node
        node = self._add(node, tuple(tokens[: self.unit]), tokens, slots)
        node.users = 1
        return node

    def _add(self, parent: Node, key: Key, tokens: list[int], slots: Range) -> Node:
        self.num_nodes, self.version = self.num_nodes + 1, self.version + 1
        node = Node(parent, key, parent.stop, tokens, slots, self.num_nodes, self.calls)
        parent.children[key] = node
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Divide a node at this position, and return the new upper part. The object remains the lower part."""
        assert node.parent is not None
        assert node.start < at < node.stop
        first, middle = at - node.start, node.slots[0] + at - node.start
        upper = self._add(node.parent, node.key, node.tokens[:first], (node.slots[0], middle))
        upper.users, upper.used = node.users, node.used
        node.tokens, node.slots, node.start = node.tokens[first:], (middle, node.slots[1]), at
        node.parent, node.key = upper, tuple(node.tokens[: self.unit])
        upper.children[node.key] = node
        return upper

    def _use(self, node: Node) -> None:
        if not node.users:
            self.idle_tokens -= len(node.tokens)
        node.users, node.used = node.users + 1, self.calls

    def _below(self, node: Node, text: list[int]) -> Node | None:
        """The child that begins with the text's next chunk."""
        return node.children.get(tuple(text[node.stop : node.stop + self.unit]))

    def _whole(self, tokens: int) -> int:
        return tokens // self.unit * self.unit

    # -- dropping ------------------------------------------------------------------------------------------------------

    def drop(self, node: Node) -> None:
        """Drop a node without users, and those below it."""
        assert node.parent is not None
        assert not node.users, "what is in use is not dropped"
        del node.parent.children[node.key]
        self.version += 1
        waiting = [node]  # and no recursion: a long text may have thousands of nodes, one below the other
        while waiting:
            gone = waiting.pop()
            waiting += gone.children.values()
            gone.alive = False
            self.idle_tokens -= len(gone.tokens)
            self.dropped_tokens += len(gone.tokens)
            if gone.tokens:
                self.free([gone.slots])

    def drop_until(self, enough: Callable[[], bool]) -> bool:
        """Drop the least recently used leaves, one after another, until there is enough; returns whether there is."""
        leaves = [(node.used, node.serial, node) for node in self.nodes() if not node.users and not node.children]
        heapq.heapify(leaves)
        while leaves:
            *_, node = heapq.heappop(leaves)
            parent = node.parent
            self.drop(node)
            if enough():
                return True
            if parent is not None and parent is not self.root and not parent.users and not parent.children:
                heapq.heappush(leaves, (parent.used, parent.serial, parent))
        return False

    def idle_at(self, slot: int) -> Node | None:
        """The node without users that has this slot."""
        return next((n for n in self.nodes() if not n.users and n.slots[0] <= slot < n.slots[1]), None)
