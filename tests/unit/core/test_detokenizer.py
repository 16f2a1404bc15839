"""Text is the same whatever the split of its tokens into runs: it equals decoding everything and cutting."""

from __future__ import annotations

import string
import time
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer
from transformers import PreTrainedTokenizerFast

from triforce_core.detokenizer import REPLACEMENT, OutputText, TextDelta, TokenText
from triforce_core.messages import TokenLogprobs
from triforce_core.models.files import load_tokenizer

KINDS = ["byte_level", "byte_fallback"]
EOS = 0  # in both
in_bytes = pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
)  # writes each byte as one printable character


@cache
def meaning(kind: str) -> TokenText:
    if kind == "byte_level":
        return TokenText(load_tokenizer("demo"))
    return TokenText(llama_tokenizer())


def llama_tokenizer() -> PreTrainedTokenizerFast:
    """Llama 2's kind: ▁ for spaces, the first of them stripped, and bytes for what is not in the vocabulary."""
    words = ["▁", "▁▁", "▁the", "▁a", "end", "END", "▁END", "\n", "é", "€", *string.ascii_letters]
    tokens = ["<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    backend = BackendTokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def ids_of(kind: str, text: str) -> list[int]:
    """Tokens of one byte each that together are the text."""
    vocabulary = meaning(kind).tokenizer.get_vocab()
    if kind == "byte_fallback":
        return [vocabulary[f"<0x{byte:02X}>"] for byte in text.encode()]
    return [vocabulary[symbol] for word, _ in in_bytes.pre_tokenize_str(text) for symbol in word]


@st.composite
def outputs(draw: st.DrawFn) -> tuple[str, list[int]]:
    """Tokens as no model would choose them: any ids, mixed with whole texts in single bytes."""
    kind = draw(st.sampled_from(KINDS))
    size = len(meaning(kind).tokenizer.get_vocab())
    anything = st.lists(st.integers(0, size - 1), max_size=8)
    bytes_of_text = st.text("aé€😀 \n", max_size=4).map(lambda text: ids_of(kind, text))
    some_bytes = st.lists(st.sampled_from(ids_of(kind, "é€😀")), max_size=6)
    parts = draw(st.lists(st.one_of(anything, bytes_of_text, some_bytes), max_size=8))
    return kind, [token for part in parts for token in part]


def split(draw: st.DrawFn, tokens: list[int]) -> list[list[int]]:
    cuts = sorted(draw(st.lists(st.integers(0, len(tokens)), max_size=10)))
    return [tokens[a:b] for a, b in pairwise([0, *cuts, len(tokens)])]


def run(output: OutputText, runs: list[list[int]]) -> list[TextDelta]:
    pieces = [output.feed(tokens, origins_of(tokens), scores_of(tokens)) for tokens in runs]
    return [*pieces, output.finish()]


def origins_of(tokens: list[int]) -> bytes:
    return bytes(token % 3 for token in tokens)


def scores_of(tokens: Sequence[int]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(-float(token)) for token in tokens)


def joined(pieces: list[TextDelta]) -> TextDelta:
    return TextDelta(
        "".join(p.text for p in pieces),
        tuple(token for p in pieces for token in p.tokens),
        b"".join(p.origins for p in pieces),
        tuple(score for p in pieces for score in p.logprobs),
    )


def cut_by_hand(meaning: TokenText, tokens: list[int], stops: list[str], *, include: bool = False) -> TextDelta:
    """The rule, from the whole text: where the first stop string ends, the longest that ends there is cut off, unless
    it is to be included.
    """
    text = meaning.decode(tokens)
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            kept = text[: end if include else end - len(max(found, key=len))]
            count = 0
            while count < len(tokens) and not certain(meaning, tokens[:count]).startswith(kept):
                count += 1
            return TextDelta(kept, tuple(tokens[:count]), origins_of(tokens[:count]), scores_of(tokens[:count]))
    return TextDelta(text, tuple(tokens), origins_of(tokens), scores_of(tokens))


def certain(meaning: TokenText, tokens: list[int]) -> str:
    """The characters that these tokens complete, whatever follows."""
    while tokens and tokens[-1] in meaning.byte_ids | meaning.special_ids:
        tokens = tokens[:-1]
    return meaning.decode(tokens).removesuffix(REPLACEMENT)


@given(st.data())
def test_the_deltas_add_up_to_the_decoding_of_all(data: st.DataObject) -> None:
    kind, tokens = data.draw(outputs())
    pieces = run(OutputText(meaning(kind)), split(data.draw, tokens))
    expected = TextDelta(meaning(kind).decode(tokens), tuple(tokens), origins_of(tokens), scores_of(tokens))
    assert joined(pieces) == expected


@given(st.data())
def test_the_lengths_tell_the_characters_that_each_token_completes(data: st.DataObject) -> None:
    kind, tokens = data.draw(outputs())
    *pieces, last = run(OutputText(meaning(kind)), split(data.draw, tokens))
    assert all(sum(piece.lengths) == len(piece.text) for piece in pieces)
    lengths = [length for piece in [*pieces, last] for length in piece.lengths]
    assert len(lengths) == len(tokens)
    completed = [len(certain(meaning(kind), tokens[: count + 1])) for count in range(len(tokens))]
    assert list(accumulate(lengths)) == completed


@given(st.data())
def test_stop_strings_cut_the_same_wherever_runs_end(data: st.DataObject) -> None:
    kind, tokens = data.draw(outputs())
    text = meaning(kind).decode(tokens)
    inside = st.integers(0, max(0, len(text) - 1)).flatmap(
        lambda start: st.integers(1, 6).map(lambda size: text[start : start + size])
    )
    stops = data.draw(st.lists(st.one_of(inside, st.text("aé \n", max_size=3)).filter(bool), max_size=3))
    stops += [stop[1:] for stop in stops if len(stop) > 1 and data.draw(st.booleans())]  # these end where the first do
    include = data.draw(st.booleans())
    once, parts = (
        joined(run(OutputText(meaning(kind), stop=stops, include_stop=include), runs))
        for runs in ([tokens], split(data.draw, tokens))
    )
    assert parts == once
    assert once == cut_by_hand(meaning(kind), tokens, stops, include=include)


@given(st.data())
def test_a_resumed_output_is_the_rest_of_the_whole(data: st.DataObject) -> None:
    """A receiver that got pieces up to some moment, and asks again with the tokens in them, gets exactly the rest."""
    kind, tokens = data.draw(outputs())
    stops = data.draw(st.lists(st.text("aé \n", min_size=1, max_size=3), max_size=2))
    runs = split(data.draw, tokens)
    first = OutputText(meaning(kind), stop=stops)
    whole = joined(run(OutputText(meaning(kind), stop=stops), runs))
    some = runs[: data.draw(st.integers(0, len(runs)))]
    got = joined([first.feed(tokens, origins_of(tokens), scores_of(tokens)) for tokens in some])
    known = list(got.tokens)
    second = OutputText(meaning(kind), stop=stops, num_resumed=len(known))
    assert joined([second.feed(piece, origins_of(piece)) for piece in split(data.draw, known)]) == TextDelta(
        "", (), b""
    )
    rest = joined(run(second, [tokens[len(known) :]]))
    assert joined([got, rest]) == whole
    assert second.num_tokens == len(whole.tokens)


def test_a_stop_string_never_leaves_fewer_than_min_tokens() -> None:
    """It does not even where later tokens complete the characters of the protected tokens."""
    tokens = ids_of("byte_level", "ab 日 日x")
    output = OutputText(meaning("byte_level"), stop=["日"], min_tokens=4)
    whole = joined(run(output, [[token] for token in tokens]))
    assert output.stopped
    assert output.num_tokens == len(whole.tokens) >= 4
    assert whole.text == "ab 日 "


@pytest.mark.parametrize("known", [0, 1, 3])
def test_stop_strings_in_the_first_tokens_of_min_tokens_do_not_stop(known: int) -> None:
    """Stop strings that lie in these tokens do not count, nor do stop strings that begin in them. Resumed tokens count
    as output.
    """
    tokens = ids_of("byte_level", "abcabcab")
    assert len(tokens) == 8
    output = OutputText(meaning("byte_level"), stop=["bc"], min_tokens=2, num_resumed=known)
    output.feed(tokens[:known], origins_of(tokens[:known]))
    rest = joined(run(output, [tokens[known:]]))
    assert rest.text == "abcabcab"[known:4]
    assert (rest.tokens, rest.logprobs) == (tuple(tokens[known:4]), scores_of(tokens[known:4]))
    assert (output.stopped, output.num_tokens) == (True, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_end_tokens_are_no_part_of_the_output(kind: str) -> None:
    tokens = [*ids_of(kind, "a€"), EOS]
    output = OutputText(meaning(kind), stop=["€x"], end_tokens=[EOS])
    assert joined(run(output, [tokens])) == TextDelta(
        "a€", tuple(tokens[:-1]), origins_of(tokens[:-1]), scores_of(tokens[:-1])
    )
    assert output.num_tokens == len(tokens) - 1


@pytest.mark.parametrize("kind", KINDS)
def test_text_comes_as_soon_as_it_is_certain(kind: str) -> None:
    output = OutputText(meaning(kind))
    vocabulary = meaning(kind).tokenizer.get_vocab()
    assert output.feed([vocabulary["e"], vocabulary["n"]], b"\0\0").text == "en"
    euro = ids_of(kind, "€")
    assert [output.feed([token], b"\0").text for token in euro[:-1]] == ["", ""]
    last = output.feed([euro[-1]], b"\0").text + output.feed([vocabulary["d"]], b"\0").text
    assert last == "€d"


def test_text_that_may_begin_a_stop_string_is_held_with_its_token() -> None:
    vocabulary = meaning("byte_level").tokenizer.get_vocab()
    output = OutputText(meaning("byte_level"), stop=["aab"])
    a, b, c = vocabulary["a"], vocabulary["b"], vocabulary["c"]
    assert output.feed([c], b"\1") == TextDelta("c", (c,), b"\1")
    assert output.feed([a, a], b"\1\2") == TextDelta("", (), b"")
    assert output.feed([a], b"\0") == TextDelta("a", (a,), b"\1")
    assert not output.stopped
    assert output.feed([b, c], b"\0\0") == TextDelta("", (), b"")
    assert output.stopped
    assert output.finish() == TextDelta("", (), b"")
    assert output.num_tokens == 2


@pytest.mark.parametrize(("character", "num_bytes"), [("a", 1), ("€", 3), ("€", 1), ("😀", 3)])
def test_the_cost_of_a_token_does_not_grow_with_the_output(character: str, num_bytes: int) -> None:
    """It does not grow even if a model repeats the beginning of a character for ever."""
    tokens = ids_of("byte_level", character)[:num_bytes]
    output = OutputText(meaning("byte_level"))

    def seconds(count: int) -> float:
        began = time.process_time()
        for _ in range(count):
            output.feed(tokens, bytes(len(tokens)))
        return time.process_time() - began

    seconds(200)
    early = seconds(500)
    seconds(5000)
    assert seconds(500) < 5 * early + 0.05
    assert len(output.detokenizer.window) <= 70
