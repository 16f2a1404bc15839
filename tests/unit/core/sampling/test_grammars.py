"""Masks: a token is allowed if and only if some complete output begins so; whatever was tried and taken back before."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from triforce_core.errors import InvalidValueError
from triforce_core.models.files import load_tokenizer, stop_token_ids
from triforce_core.sampling.grammars import Grammars, GrammarState
from triforce_core.sampling.guides import Guide, of_ebnf

VOCAB, STOPS = 4096, stop_token_ids("demo")
CHOICES = ["return self", "return None", "raise", "ra"]


@cache
def grammars() -> Grammars:
    return Grammars(lambda: load_tokenizer("demo"), VOCAB)


def state(guide: Guide) -> GrammarState:
    made = grammars().state(guide.grammar(), wait=True)
    assert made is not None
    return made


def encoded(text: str) -> list[int]:
    return load_tokenizer("demo")(text, add_special_tokens=False)["input_ids"]  # type: ignore[no-any-return]


@cache
def texts() -> list[str]:
    tokenizer = load_tokenizer("demo")
    return [tokenizer.decode([token]) for token in range(VOCAB)]


def allowed(mask: torch.Tensor) -> set[int]:
    return set(mask.nonzero().flatten().tolist())


@pytest.mark.parametrize("written", ["", "r", "ra", "return ", "return self"])
def test_a_token_is_allowed_if_and_only_if_some_output_begins_so(written: str) -> None:
    mask = state(Guide("choice", CHOICES)).masks(encoded(written), [], 0, STOPS)[0]
    begun = {t for t, text in enumerate(texts()) if text and any(c.startswith(written + text) for c in CHOICES)}
    ends = set(STOPS) if written in CHOICES else set()
    assert allowed(mask) == (begun - set(STOPS)) | ends
    assert allowed(mask), "each of these texts can be continued or ended"


SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}})
OUTPUT = encoded('{"a": 17, "b": "some text"}')
outputs = st.lists(st.tuples(st.integers(0, len(OUTPUT)), st.integers(0, 5), st.integers(0, VOCAB - 1)), max_size=6)


@given(outputs)
def test_a_mask_depends_on_the_text_alone(steps: list[tuple[int, int, int]]) -> None:
    """Each step asks for the masks of a block whose last drafted token may be wrong."""
    guide = Guide("json_schema", SCHEMA)
    used, before = state(guide), list[int]()
    for length, drafted, wrong in steps:
        output, block = OUTPUT[:length], [*OUTPUT[length : length + drafted], wrong]
        unchanged = next(
            (i for i, (a, b) in enumerate(zip(before, output, strict=False)) if a != b), min(len(before), length)
        )
        masks = used.masks(output, block, unchanged, STOPS)
        assert torch.equal(masks, state(guide).masks(output, block, 0, STOPS))
        for row in range(len(block)):
            alone = state(guide).masks([*output, *block[:row]], [], 0, STOPS)[0]
            assert torch.equal(masks[row], alone)
        before = [*output, *block]


def test_stop_tokens_of_the_request_end_a_complete_output_only() -> None:
    extra = (*STOPS, 77)
    masks = state(Guide("regex", "ra(ise)?")).masks([], encoded("raise"), 0, extra)
    assert not masks[0, list(extra)].any()
    assert masks[-1, list(extra)].all()
    assert allowed(masks[-1]) == set(extra)


def test_a_text_that_the_grammar_forbids_can_not_be_continued() -> None:
    assert not state(Guide("choice", CHOICES)).masks(encoded("else"), [], 0, STOPS).any()


def test_a_tier_that_does_not_wait_decodes_unmasked_until_the_grammar_is_compiled() -> None:
    fresh, grammar = Grammars(lambda: load_tokenizer("demo"), VOCAB), Guide("regex", "[a-z]{1,99}").grammar()
    first = fresh.state(grammar, wait=False)
    fresh.compile(grammar).result()
    assert first is None
    assert fresh.state(grammar, wait=False) is not None


def test_compiled_grammars_are_kept_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = Grammars(lambda: load_tokenizer("demo"), VOCAB)

    def compile(count: int) -> str:
        grammar = Guide("regex", f"a{{{count + 1}}}").grammar()
        fresh.compile(grammar).result()
        return grammar

    small = [compile(count) for count in range(260)]
    assert len(fresh.compiled) == len(fresh.mib) == 256
    assert small[0] not in fresh.compiled
    monkeypatch.setattr("triforce_core.sampling.grammars.LEAST_MIB", 200)
    large = [compile(1000), compile(1001)]
    assert [*fresh.compiled] == [*fresh.mib] == large[1:]


@pytest.mark.parametrize(
    ("form", "value"),
    [
        ("json_schema", "{"),
        ("json_schema", "[1]"),
        ("json_schema", '{"type": "nonsense"}'),
        ("json_schema", '{"$ref": "https://example.com/schema"}'),
        ("json_schema", ""),
        ("json_schema", '{"x": ' * 5000 + "1" + "}" * 5000),
        ("json_object", False),
        ("regex", "(a"),
        ("regex", "a\\"),
        ("regex", "(((a{1000}){1000}){1000}){1000}"),
        ("json_schema", '{"type": "string", "pattern": "^(((a{1000}){1000}){1000}){1000}$"}'),
        ("json_schema", '{"multipleOf": 999983}'),
        ("grammar", "start: A\nA: /(((a{1000}){1000}){1000}){1000}/"),
        ("regex", "(?=a)b"),
        ("regex", "(" * 3000 + ")" * 3000),
        ("choice", []),
        ("choice", ["a", ""]),
        ("grammar", "start: nothing_here"),
        ("grammar", "root ::= ("),
        ("grammar", "x" * 300_000),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_no_grammar_is_refused_by_name(form: str, value: object) -> None:
    with pytest.raises(InvalidValueError, match=f"^{form}: "):
        compiled(Guide(form, value))


def compiled(guide: Guide) -> None:
    guide.check(grammars().compile(guide.grammar()).result().get_error())


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "regex",
    [
        "(a{1,1000}){1,1000}b",
        "((a|b)*a(a|b){300})",
        "(.*a){0,500}b",
        "(((a?){50}){50}){50}",
        "(((a{1000}){1000}){1000}){1000}",
        "x?(((a{1000}){1000}){1000}){1000}",
    ],
)
def test_a_regex_that_explodes_ends_by_the_librarys_limits(regex: str) -> None:
    """The regex is refused, so that no token is allowed, or it is masked like any other."""
    masks = state(Guide("regex", regex)).masks([], encoded("a" * 40), 0, STOPS)
    assert masks.shape[1] == VOCAB


def test_both_kinds_of_ebnf_are_read() -> None:
    for start in ("start: ", "?start: ", "!start: ", "%llguidance {}\nstart: ", "// a comment\n?start : ", "root ::= "):
        grammar = f'{start}"a" ("b" | {"root" if "root" in start else "start"})'
        masks = state(Guide("grammar", grammar)).masks(encoded("a"), [], 0, STOPS)
        assert {texts()[t] for t in allowed(masks[0])} >= {"a", "b"}


def test_who_stops_waiting_for_a_grammar_does_not_stop_others() -> None:
    """A client that leaves cancels its own wait; the compiler was still busy with another grammar."""
    fresh, busy = Grammars(lambda: load_tokenizer("demo"), VOCAB), threading.Event()
    fresh.compiler.submit(busy.wait)
    grammar = Guide("regex", "[a-z]{1,9}").grammar()

    async def both() -> bool:
        first, second = (asyncio.create_task(fresh.matcher(grammar)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        busy.set()
        return (await second).is_error()

    assert not asyncio.run(both())


def test_the_first_mask_is_that_of_the_beginning() -> None:
    """What the compiler tried in advance leaves no trace."""
    for guide in (Guide("choice", ["return self"]), Guide("regex", "ab+"), Guide("json_schema", SCHEMA)):
        [mask] = state(guide).masks([], [], 0, STOPS)
        uncompiled = LLMatcher(grammars().tokenizer, guide.grammar(), log_level=0)
        bits = np.unpackbits(np.frombuffer(uncompiled.compute_bitmask(), np.uint8), bitorder="little")
        assert allowed(mask) == set(bits.nonzero()[0].tolist()) - set(STOPS)


# Beyond "^" the library gives up: three thousand rules may begin at every place.
ENDLESS = 'start: "a"~50 | "b" s\ns: ' + " | ".join(f"r{i}" for i in range(3000))
ENDLESS += "".join(f'\nr{i}: "c" s "d{i}" | "c"' for i in range(3000))


def test_a_wrong_draft_that_meets_the_librarys_limits_leaves_no_trace() -> None:
    """The drafted branch is beyond the limits; the branch that the output takes is not."""
    made = state(Guide("grammar", ENDLESS))
    [a], [b], [c] = encoded("a"), encoded("b"), encoded("c")
    masks = made.masks([], [b, c, c, c], 0, STOPS)
    assert made.matcher.is_error() or not masks[-1].any(), "this grammar is too easy for this test"
    assert torch.equal(made.masks([a], [], 0, STOPS), state(Guide("grammar", ENDLESS)).masks([a], [], 0, STOPS))
    assert made.masks([a], [], 0, STOPS).any()


def test_an_end_token_that_does_not_end_the_output_is_never_allowed() -> None:
    """A model's configuration may lack the tokenizer's end token; then it would be drawn, and end nothing."""
    mask = state(Guide("choice", ["raise"])).masks(encoded("raise"), [], 0, (77,))[0]
    assert allowed(mask) == {77}


def test_a_token_of_the_grammar_may_be_a_stop_token() -> None:
    [brace] = encoded("}")
    mask = state(Guide("json_object", True)).masks(encoded("{"), [], 0, (*STOPS, brace))[0]
    assert mask[brace]
    assert not mask[list(STOPS)].any()


def test_a_tokenizer_may_know_more_tokens_than_the_model() -> None:
    small = Grammars(lambda: load_tokenizer("demo"), VOCAB - 100)
    made = small.state(Guide("regex", "[a-z]+").grammar(), wait=True)
    assert made is not None
    assert made.masks([], [], 0, STOPS).shape == (1, VOCAB - 100)


def test_a_tokenizer_that_fails_is_refused_by_name_and_tried_again() -> None:
    attempts = []

    def load() -> object:
        attempts.append(1)
        if len(attempts) == 1:
            raise ValueError("only fast tokenizers")
        return load_tokenizer("demo")

    fresh, grammar = Grammars(load, VOCAB), Guide("regex", "a").grammar()
    with pytest.raises(InvalidValueError, match=r"^grammar: .*only fast tokenizers"):
        fresh.compile(grammar).result()
    assert not fresh.compile(grammar).result().is_error()


def test_a_text_that_does_not_fit_leaves_no_trace() -> None:
    """What is drafted after the text is not consumed in its place."""
    made, [r, x] = state(Guide("choice", CHOICES)), [encoded("ra")[0], encoded("else")[0]]
    made.masks([r, x], [r], 0, STOPS)
    assert not made.masks([r, x, r], [], 2, STOPS).any()


def test_empty_lines_of_a_grammar_take_no_time() -> None:
    began = time.process_time()
    with pytest.raises(InvalidValueError, match="cannot be read"):
        of_ebnf("\n" * 200_000 + "x")
    assert time.process_time() - began < 10  # minutes, if the time grew with the square
    assert of_ebnf('root ::= a\n\n \na ::= "x"') == of_ebnf('root ::= a\na ::= "x"')
