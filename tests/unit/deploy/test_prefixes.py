"""Which replica a request goes to: what is remembered of prompts, and for how long."""

from __future__ import annotations

import asyncio
import pickle
import random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from deploy.prefixes import BLOCK, KEY_BYTES, MARGIN, TOKENS_PER_REQUEST, PrefixIndex, preferred, prefix_keys, salt_key
from deploy.replica import reads_all
from deploy.routing import PrefixRouter, Route
from triforce_core._gen.triforce.v1 import generation_pb2 as gen
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb

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


def test_keys_go_on_from_those_of_the_text_before() -> None:
    whole, before = prefix_keys(TEXT), prefix_keys(TEXT[: 3 * BLOCK])
    assert before + prefix_keys(TEXT[3 * BLOCK :], before[-KEY_BYTES:]) == whole


def test_texts_with_different_salts_share_no_key() -> None:
    salts = ["", "a", "b", "a ", "ä"]
    keys = [set(split(prefix_keys(TEXT, salt_key(salt)))) for salt in salts]
    assert sum(map(len, keys)) == len(set.union(*keys)) == 10 * len(salts)
    assert prefix_keys(TEXT, salt_key("")) == prefix_keys(TEXT)


def split(keys: bytes) -> list[bytes]:
    return [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]


def ids(blocks: int) -> bytes:
    return prefix_keys(TEXT[: blocks * BLOCK])


def matches(index: PrefixIndex[str], keys: bytes, replicas: str = "abcd") -> list[int]:
    return [index.match(replica, keys) for replica in replicas]


def test_a_match_is_as_long_as_what_was_sent() -> None:
    index: PrefixIndex[str] = PrefixIndex(100)
    index.add("a", ids(2))
    index.add("b", ids(5))
    index.add("c", prefix_keys(TEXT[BLOCK:]))
    assert matches(index, ids(10)) == [2, 5, 0, 0]
    assert matches(index, ids(2)) == [2, 2, 0, 0]
    assert matches(index, b"") == [0, 0, 0, 0]
    branched = prefix_keys([*TEXT[: 3 * BLOCK], *reversed(TEXT)])
    assert matches(index, branched) == [2, 3, 0, 0]


def test_those_that_are_gone_are_forgotten() -> None:
    index: PrefixIndex[str] = PrefixIndex(100)
    index.add("a", ids(5))
    index.add("b", ids(2))
    index.keep(["b", "c"])
    index.hold("a", ids(5))  # its last answer comes late
    assert matches(index, ids(5)) == [0, 2, 0, 0]
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


def documents(count: int) -> list[bytes]:
    """Keys of ten blocks each, of texts that share nothing."""
    return [prefix_keys([document, *TEXT[1:]]) for document in range(count)]


def test_a_text_that_was_dropped_takes_along_what_was_used_before_it() -> None:
    index: PrefixIndex[str] = PrefixIndex(1000)
    texts = documents(4)
    for keys in texts:
        index.add("a", keys)
        index.hold("a", keys)
    index.hold("a", texts[0])  # it has ended just now
    index.missed("a", index.add("a", texts[2]), 0)
    assert [index.match("a", keys) for keys in texts] == [10, 0, 10, 10], "2 is being read, 0 and 3 were used later"


@pytest.mark.parametrize(("matched", "kept"), [(10, 10), (10 - MARGIN, 10), (9 - MARGIN, 0), (0, 0)])
def test_a_match_that_is_shorter_by_less_than_the_margin_teaches_nothing(matched: int, kept: int) -> None:
    index: PrefixIndex[str] = PrefixIndex(1000)
    older, text = documents(2)
    for keys in (older, text):
        index.add("a", keys)
        index.hold("a", keys)
    index.missed("a", index.add("a", text), matched * BLOCK + BLOCK // 2)
    assert index.match("a", older) == kept


def test_what_is_still_being_read_is_not_missed() -> None:
    """Two requests on a new document come together. The second may find nothing, although nothing was dropped."""
    index: PrefixIndex[str] = PrefixIndex(1000)
    older, text = documents(2)
    index.add("a", older)
    index.hold("a", older)
    turns = [index.add("a", text) for _ in range(2)]
    for each in turns:
        index.missed("a", each, 0)
        index.hold("a", text)
    assert (index.match("a", older), index.match("a", text)) == (10, 10)


def of(tokens: int) -> int:
    return tokens // BLOCK


LONG = of(4 * TOKENS_PER_REQUEST)


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
    match = {"a": 2 * LONG, "b": 2 * LONG, "c": LONG}
    assert preferred(match, 2 * LONG, ongoing, busier_by=4) == expected


def test_each_request_more_is_paid_for_by_matched_tokens() -> None:
    for worth in range(1, 5):
        match = {"a": of(worth * TOKENS_PER_REQUEST), "b": 0}
        drawn = [preferred(match, LONG // 2, {"a": busy, "b": 0}, busier_by=3) for busy in range(6)]
        if match["a"] * 2 >= LONG // 2:
            assert drawn == [["a"]] * (min(worth, 3) + 1) + [[]] * (5 - min(worth, 3))


def test_a_short_prefix_does_not_draw() -> None:
    """A system prompt that all requests share must not send them all to one replica, whether they wait or not."""
    idle = {"a": 0, "b": 0}
    assert preferred({"a": 1, "b": 0}, 1, idle, busier_by=4) == []
    shared = of(2 * TOKENS_PER_REQUEST)
    assert preferred({"a": shared, "b": 0}, 2 * shared, idle, busier_by=4) == ["a"]
    assert preferred({"a": shared, "b": 0}, 2 * shared + 1, idle, busier_by=4) == [], "most of the prompt is new"
    assert preferred({"a": 0, "b": 0}, 0, idle, busier_by=4) == []
    assert preferred({}, 4, {}, busier_by=4) == []


def test_a_route_teaches_the_index_what_was_found_and_said() -> None:
    index: PrefixIndex[str] = PrefixIndex(1000)
    prompt, output = TEXT[:200], TEXT[200:400]
    first = Route(prompt)
    first.taken("a", index)
    first.answered(0)
    first.ended(output)
    assert index.match("a", prefix_keys(TEXT)) == of(400)
    unknown = Route()
    unknown.taken("a", index)
    unknown.answered(0)
    unknown.ended(output)
    assert index.match("a", prefix_keys(TEXT)) == of(400), "it finds nothing anywhere, so it tells nothing"
    again = Route(TEXT[:400])
    again.taken("a", index)
    again.answered(0)
    assert index.match("a", prefix_keys(TEXT)) == of(400), "it has been read again"
    salted = Route(TEXT, "salt")
    assert index.match("a", salted.keys) == 0


def test_a_route_stays_at_the_gateway() -> None:
    route = Route(TEXT, "salt")
    assert len(pickle.dumps(route)) < 100
    assert pickle.loads(pickle.dumps(route)).keys == b""


class Name(NamedTuple):
    unique_id: str


def chosen(router: Any, route: Route) -> list[Name]:
    """The first list of replicas that Serve is given."""
    replicas = [SimpleNamespace(replica_id=Name(name)) for name in "abcd"]
    request = SimpleNamespace(kwargs={"route": route}, routing_context=SimpleNamespace())
    return [each.replica_id for each in asyncio.run(router.choose_replicas(replicas, request))[0]]


def test_first_requests_that_come_together_go_to_one_replica() -> None:
    """None has been accepted by a replica when the next is routed."""
    router: Any = PrefixRouter.__new__(PrefixRouter)  # without Serve
    router.initialize_state(capacity=1000, busier_by=4)
    routes = [Route(TEXT) for _ in range(8)]
    [likely] = chosen(router, routes[0])
    assert all(chosen(router, route) == [likely] for route in routes)
    turn = router.index.turn
    request: Any = SimpleNamespace(kwargs={"route": routes[0]})
    router.on_request_routed(request, likely, None)
    assert router.index.turn == turn, "it has been noted"
    router.on_request_routed(request, Name("another"), None)
    routes[0].answered(0)
    assert router.index.match(Name("another"), routes[0].keys) == 10, "what is learnt is of the replica that Serve took"


@pytest.mark.parametrize(
    ("selector", "lookaheads", "by_default", "whole"),
    [
        ("h2o", None, True, True),
        ("h2o", (4, 0), False, True),
        ("h2o", (0, 4), True, False),  # nothing is selected where the retrieval tier does not draft
        ("h2o", None, False, False),
        ("", (0, 0), True, False),
        ("snapkv", None, True, False),
    ],
)
def test_who_reads_all_is_sent_anywhere(
    selector: str, lookaheads: tuple[int, int] | None, by_default: bool, whole: bool
) -> None:
    given = None if lookaheads is None else gen.Lookaheads(values=lookaheads)
    request = pb.DecodeRequest(selector=selector, lookaheads=given)
    assert reads_all(request, "h2o", retrieves=by_default) == whole
    assert reads_all(pb.DecodeRequest(selector=selector, prompt_logprobs=0), "snapkv", retrieves=False)
