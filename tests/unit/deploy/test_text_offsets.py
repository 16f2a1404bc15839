"""`logprobs.text_offset`: where each token begins in the text that the client gets, also after broken characters."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deploy.openai_api.logprobs import CompletionLogprobs, TokenStrings
from deploy.parts import Part
from tests.scripted import ask, ids, model, scored, served
from tests.unit.core.test_detokenizer import EOS, ids_of, meaning, outputs
from triforce_core._gen.triforce.v1 import generation_pb2 as gen
from triforce_core.detokenizer import OutputText, TextDelta
from triforce_core.messages import TokenLogprobs


@cache
def strings() -> TokenStrings:
    made = TokenStrings()
    asyncio.run(made.load(model()))
    return made


def begins_a_character(kind: str, token: int) -> bool:
    if kind == "byte_fallback":
        return token not in meaning(kind).byte_ids
    return strings().bytes_of(token)[0] & 0xC0 != 0x80


def received(
    kind: str, tokens: Sequence[int], cuts: Sequence[int], *, resumed: int = 0, stop: Sequence[str] = ()
) -> tuple[str, list[int], list[int]]:
    """The text that a client gets, the offsets, and the tokens that they are of. The tokens come in blocks that end at
    `cuts`; the client has the first `resumed` of them.
    """
    output = OutputText(meaning(kind), stop=stop, end_tokens=(EOS,), num_resumed=resumed)
    named = cast("TokenStrings", str)
    logprobs = CompletionLogprobs(named, meaning(kind), 0, resume=tuple(tokens[:resumed]))
    text, offsets, told = "", list[int](), list[int]()
    edges = sorted({0, resumed, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    pieces = []
    for start, end in pairwise(edges):
        block = tokens[start:end]
        pieces.append(output.feed(block, bytes(len(block)), [TokenLogprobs(-1.0) for _ in block]))
    pieces.append(output.finish())
    for piece in pieces:
        # Of resumed tokens the client has the text already, and gets neither.
        found = logprobs.of(part_of(piece), ())
        text, told = text + piece.text, [*told, *piece.tokens]
        offsets += found["text_offset"]
    return text, offsets, told


def part_of(piece: TextDelta) -> Part:
    return Part(piece, seed=0, prompt_tokens=1)


def check(kind: str, tokens: Sequence[int], cuts: Sequence[int], **options: Any) -> None:
    text, offsets, told = received(kind, tokens, cuts, **options)
    assert len(offsets) == len(told)
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(text) for offset in offsets)
    resumed = list(tokens[: options.get("resumed", 0)])
    had = len(certain(kind, resumed))
    for place, (token, offset) in enumerate(zip(told, offsets, strict=True)):
        before = meaning(kind).decode(resumed + told[:place])[had:]
        assert text.startswith(before[:offset]), "what stands before a token comes from the tokens before it"
        if token not in meaning(kind).special_ids and begins_a_character(kind, token):
            assert offset == len(before), "a token that begins a character begins where the text before it ends"


def certain(kind: str, tokens: Sequence[int]) -> str:
    """The text that a client has of tokens that may go on."""
    return OutputText(meaning(kind), end_tokens=(EOS,)).feed(tokens, bytes(len(tokens))).text


@given(outputs(), st.lists(st.integers(0, 40), max_size=6))
@example(("byte_level", [*ids_of("byte_level", "日")[:1], *ids_of("byte_level", "ab")]), [1])
@example(
    ("byte_fallback", [*ids_of("byte_fallback", "日")[:2], *meaning("byte_fallback").tokenizer("a").input_ids]), []
)
def test_offsets_are_places_in_the_text(output: tuple[str, list[int]], cuts: list[int]) -> None:
    kind, tokens = output
    check(kind, [token for token in tokens if token != EOS], cuts)


@given(outputs(), st.lists(st.integers(0, 40), max_size=6), st.integers(0, 40))
def test_offsets_of_an_output_that_goes_on(output: tuple[str, list[int]], cuts: list[int], resumed: int) -> None:
    """Whoever resumes an output in the middle of a character gets that character whole."""
    kind, tokens = output
    tokens = [token for token in tokens if token != EOS]
    check(kind, tokens, cuts, resumed=min(resumed, len(tokens)))


@given(outputs(), st.lists(st.integers(0, 40), max_size=6), st.sampled_from(["e", "\ufffd", " a", "€"]))
def test_offsets_before_a_stop_string(output: tuple[str, list[int]], cuts: list[int], stop: str) -> None:
    kind, tokens = output
    text, offsets, told = received(kind, [token for token in tokens if token != EOS], cuts, stop=[stop])
    assert len(offsets) == len(told)
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(text) for offset in offsets)


@pytest.mark.parametrize(
    ("tokens", "text", "expected"),
    [
        ([b"a", b"\xe6", b"\x97", b"\xa5", b"b"], "a日b", [0, 1, 1, 1, 2]),  # a character of three tokens
        ([b"\xe6", b"a"], "\ufffda", [0, 1]),  # a beginning that does not go on
        ([b"\xe6", b"\x97", b"a"], "\ufffda", [0, 0, 1]),
        ([b"\xe6", b"\xe6", b"\x97", b"\xa5"], "\ufffd日", [0, 1, 1, 1]),
        ([b"\x80", b"\x80", b"a"], "\ufffd\ufffda", [0, 1, 2]),  # bytes of no character
        ([b"a", b"\xe6"], "a\ufffd", [0, 1]),  # the end of the output
    ],
)
def test_offsets_of_single_bytes(tokens: list[bytes], text: str, expected: list[int]) -> None:
    vocabulary = {strings().bytes_of(token): token for token in range(4096)}
    ids = [vocabulary[each] for each in tokens]
    for cuts in ([], [1], [1, 2, 3, 4]):
        assert received("byte_level", ids, cuts)[:2] == (text, expected)


def test_an_answer_that_goes_on_in_the_middle_of_a_character() -> None:
    first, *rest = ids("日")
    client, _, _ = served(scored(rest), scored(ids("b"), gen.FINISH_REASON_LENGTH))
    [choice] = ask(client, resume_token_ids=[first], seed=1, logprobs=0).json()["choices"]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("日b", [0, 0, 1])
