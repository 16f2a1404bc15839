"""Which replica a request goes to: what is remembered of prompts, and for how long."""

from __future__ import annotations

import random

import pytest

from deploy.prefixes import BLOCK, KEY_BYTES, PrefixIndex, preferred, prefix_keys

RNG = random.Random(0)
TEXT = [RNG.randrange(4096) for _ in range(10 * BLOCK)]


def test_a_block_has_a_key_when_it_is_whole() -> None:
    assert [len(prefix_keys(TEXT[:n])) // KEY_BYTES for n in (0, 1, 63, 64, 65, 127, 128, 640)] == [
        0, 0, 0, 1, 1, 1, 2, 10,
    ]  # fmt: skip


def test_a_key_stands_for_everything_before_it() -> None:
    keys = prefix_keys(TEXT)
    assert prefix_keys(TEXT[: 3 * BLOCK]) == keys[: 3 * KEY_BYTES]
    other = [TEXT[0] + 1, *TEXT[1:]]
    assert not set(split(prefix_keys(other))) & set(split(keys))
    assert len(set(split(prefix_keys([7] * 10 * BLOCK)))) == 10, "equal blocks at other places are other prefixes"


def split(keys: bytes) -> list[bytes]:
    return [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]


def ids(blocks: int) -> bytes:
    return prefix_keys(TEXT[: blocks * BLOCK])


def test_the_holder_of_the_longest_prefix_is_found() -> None:
    index: PrefixIndex[str] = PrefixIndex(100)
    index.add("a", ids(2))
    index.add("b", ids(5))
    index.add("c", prefix_keys(TEXT[BLOCK:]))
    everyone = ("a", "b", "c", "d")
    assert index.holders(everyone, ids(10)) == ["b"]
    assert index.holders(everyone, ids(2)) == ["a", "b"]
    assert index.holders(("a", "c", "d"), ids(10)) == ["a"]
    assert index.holders(("c", "d"), ids(10)) == []
    assert index.holders(everyone, b"") == []
    branched = prefix_keys([*TEXT[: 3 * BLOCK], *reversed(TEXT)])
    assert index.match("b", branched) == 3
    assert index.match("d", branched) == 0


def test_those_that_are_gone_are_forgotten() -> None:
    index: PrefixIndex[str] = PrefixIndex(100)
    index.add("a", ids(5))
    index.add("b", ids(2))
    index.keep(["b", "c"])
    assert index.holders(("a", "b", "c"), ids(5)) == ["b"]
    assert index.sent.keys() == {"b"}


def test_what_was_sent_longest_ago_is_forgotten_first_and_from_its_end() -> None:
    index: PrefixIndex[str] = PrefixIndex(6)
    old, new = ids(4), prefix_keys(TEXT[1 : 1 + 4 * BLOCK])
    index.add("a", old)
    index.add("a", new)
    assert (index.match("a", old), index.match("a", new)) == (2, 4)
    index.add("a", old[: 2 * KEY_BYTES])  # used again: now the other is older
    index.add("a", prefix_keys(TEXT[2 : 2 + 3 * BLOCK]))
    assert (index.match("a", old), index.match("a", new)) == (2, 1)
    index.add("b", ids(10))
    assert index.match("b", ids(10)) == 6, "of a prompt that is too long, the beginning"
    assert all(len(known) <= 6 for known in index.sent.values())


@pytest.mark.parametrize(
    ("ongoing", "expected"),
    [
        ({"a": 0, "b": 0, "c": 0}, ["a", "b"]),
        ({"a": 4, "b": 5, "c": 0}, ["a"]),
        ({"a": 5, "b": 9, "c": 0}, []),
        ({"a": 5, "b": 9, "c": 5}, ["a", "b"]),
    ],
)
def test_a_prefix_is_not_worth_any_wait(ongoing: dict[str, int], expected: list[str]) -> None:
    assert preferred(["a", "b"], ongoing, busier_by=4) == expected
