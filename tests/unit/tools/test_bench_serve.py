"""The parts of `triforce bench serve`: the load, its prompts, and the figures of given records."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import Refusals
from triforce_core.client.results import Usage
from triforce_core.errors import InvalidValueError
from triforce_tools.load.answers import FailedError, Piece, Question, Record
from triforce_tools.load.measures import Goals, figures_of
from triforce_tools.load.prompts import DOCUMENT_SHARE, WORDS, Prompts, words_of
from triforce_tools.load.sender import Asking, Sender
from triforce_tools.load.trace import read_trace
from triforce_tools.load.workload import Lengths, Load, PlannedRequest


def test_the_same_seed_gives_the_same_load() -> None:
    def planned(**changed: Any) -> list[PlannedRequest]:
        given: dict[str, Any] = {"rate": 3.0, "input": Lengths(10, 900), "output": Lengths(1, 50), "shared": 0.5}
        return list(Load(**{**given, "documents": 3, "requests": 50, "seed": 7, **changed}).planned())

    assert planned() == planned()
    assert planned(seed=8) != planned()
    for fewer in planned(requests=20), planned(duration_s=5.0):
        assert 0 < len(fewer) < 50
        assert fewer == planned()[: len(fewer)]
    # Another rate, or users, ask for the same texts of the same lengths.
    asked = [(each.input_tokens, each.output_tokens, each.document) for each in planned()]
    for other in planned(rate=9.0), planned(rate=None, concurrency=2):
        assert [(each.input_tokens, each.output_tokens, each.document) for each in other] == asked
    assert {each.arrival_s for each in planned(rate=None, concurrency=2)} == {None}


def test_arrivals_are_poisson() -> None:
    """Of n exponential gaps with mean 1/rate, the mean has a standard error of 1/(rate √n), and the share above the
    mean, 1/e, one of √(p(1-p)/n): both stay within four of them.
    """
    n, rate = 4000, 5.0
    arrivals = [0.0, *(each.arrival_s or 0.0 for each in Load(rate=rate, requests=n).planned())]
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    assert all(gap > 0 for gap in gaps)
    assert sum(gaps) / n == pytest.approx(1 / rate, abs=4 / (rate * math.sqrt(n)))
    above, p = sum(gap > 1 / rate for gap in gaps) / n, math.exp(-1)
    assert above == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / n))


def test_lengths_are_uniform_in_both_bounds() -> None:
    drawn = [each.input_tokens for each in Load(rate=1, requests=600, input=Lengths(3, 5)).planned()]
    assert set(drawn) == {3, 4, 5}
    assert min(drawn.count(length) for length in (3, 4, 5)) > 150  # 200 expected, standard deviation 11.5
    assert str(Lengths.parse("input", "3:5")) == "3:5"
    assert Lengths.parse("input", "7") == Lengths(7, 7)


def test_users_are_given_requests_without_end() -> None:
    endless = Load(concurrency=3, duration_s=1.0).planned()
    assert [each.index for each in islice(endless, 1000)] == list(range(1000))


def test_prompts_have_their_words_and_shared_ones_their_document() -> None:
    prompts = Prompts(seed=1, tokens_per_word=2.0)
    own = [PlannedRequest(index, 0.0, 2 * words, 1) for index, words in enumerate((1, 5, 16, 100, 1000))]
    assert [len(prompts.text(each).split()) for each in own] == [1, 5, 16, 100, 1000]
    assert prompts.text(own[4]) == Prompts(1, 2.0).text(own[4])
    assert set(prompts.text(own[4]).split()) <= set(WORDS)

    long, short, other = (
        prompts.text(PlannedRequest(index, 0.0, 2 * words, 1, document)).split()
        for index, (words, document) in enumerate([(1000, 0), (500, 0), (500, 1)])
    )
    assert (len(long), len(short)) == (1000, 500)
    common = int(DOCUMENT_SHARE * 500)
    assert long[:common] == short[:common] != other[:common]
    assert long[common:500] != short[common:]
    assert prompts.text(PlannedRequest(0, 0.0, 2, 1, document=0)) == words_of("1 prompt 0", 1)  # too short for both


TRACE = """
{"arrival_s": 0, "input_tokens": 100, "output_tokens": 10}
{"arrival_s": 1.5, "input_tokens": 2000, "output_tokens": 1, "priority": 2}

{"arrival_s": 1.5, "input_tokens": 3, "output_tokens": 20}
"""


def test_a_trace_is_read_and_sent_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE)
    load = Load(trace=read_trace(path))
    assert list(load.planned()) == [
        PlannedRequest(0, 0.0, 100, 10),
        PlannedRequest(1, 1.5, 2000, 1, priority=2),
        PlannedRequest(2, 1.5, 3, 20),
    ]
    assert len(list(Load(trace=load.trace, duration_s=1.5).planned())) == 1
    assert len(list(Load(trace=load.trace, requests=2).planned())) == 2


GOOD = '{"arrival_s": 5, "input_tokens": 1, "output_tokens": 1}\n'


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (GOOD + "nonsense", "trace.jsonl, line 2: 'nonsense' must be a JSON object"),
        (GOOD + "[1, 2]", "line 2: '.1, 2.' must be a JSON object"),
        (GOOD + "[" * 100_000, "line 2: .* must be a JSON object"),
        ('\n{"arrival_s": 0, "input_tokens": 1}', "line 2, output_tokens: .* Field required"),
        (GOOD.replace("5", "-1"), "line 1, arrival_s: -1 .* greater than or equal to 0"),
        (GOOD.replace("5", "NaN"), "line 1, arrival_s: nan .* finite"),
        (GOOD.replace("5", '"5"'), "line 1, arrival_s: '5' .* valid number"),
        (GOOD.replace('tokens": 1', 'tokens": 0'), "line 1, input_tokens: 0 .* greater than or equal to 1"),
        (GOOD.replace('tokens": 1', 'tokens": 1.5'), "line 1, input_tokens: 1.5 .* valid integer"),
        (GOOD.replace('tokens": 1', f'tokens": {10**12}'), "line 1, input_tokens: 1000000000000 .* less than"),
        (GOOD.replace('tokens": 1}', 'tokens": 1, "prompt": "x"}'), "line 1, prompt: 'x' .* not permitted"),
        (GOOD + GOOD.replace("5", "4"), "line 2, arrival_s: 4.0 is before the arrival of the line above"),
        ("\n", "trace: .* has no requests"),
        ("\udcff", "trace: .* is not UTF-8 text"),
    ],
)
def test_a_bad_trace_names_file_line_field_and_rule(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(InvalidValueError, match=named):
        read_trace(path)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], ["arrivals", "None", "one of --rate, --concurrency and --trace"]),
        (["--rate", "1", "--concurrency", "1", "--requests", "1"], ["arrivals", "rate and concurrency", "one of"]),
        (["--trace", "/nowhere"], ["trace", "/nowhere", "No such file"]),
        (["--trace", "FILE", "--rate", "1"], ["arrivals", "rate and trace", "one of"]),
        (["--trace", "FILE", "--input", "5"], ["trace", "states the lengths: leave out input"]),
        (["--rate", "1"], ["requests", "None", "--duration", "a load needs an end"]),
        (["--rate", "0", "--requests", "1"], ["rate", "0.0", "above 0"]),
        (["--rate", "nan", "--requests", "1"], ["rate", "nan", "above 0"]),
        (["--rate", "inf", "--requests", "1"], ["rate", "inf", "finite"]),
        (["--concurrency", "0", "--requests", "1"], ["concurrency", "0", "at least 1"]),
        (["--rate", "1", "--requests", "0"], ["requests", "0", "at least 1"]),
        (["--rate", "1", "--duration", "inf"], ["duration", "inf", "finite"]),
        (["--rate", "1", "--requests", "1", "--input", "9:5"], ["input", "9:5", "empty range"]),
        (["--rate", "1", "--requests", "1", "--input", "5-9"], ["input", "5-9", "two for a range"]),
        (["--rate", "1", "--requests", "1", "--input", "٣"], ["input", "whole number"]),
        (["--rate", "1", "--requests", "1", "--output", "0"], ["output", "0", "between 1 and"]),
        (["--rate", "1", "--requests", "1", "--output", "1:99999999"], ["output", "1:99999999", "10000000"]),
        (["--rate", "1", "--requests", "1", "--shared", "1.1"], ["shared", "1.1", "between 0 and 1"]),
        (["--rate", "1", "--requests", "1", "--documents", "0"], ["documents", "0", "at least 1"]),
        (["--rate", "1", "--requests", "1", "--seed", str(2**63)], ["seed", str(2**63), "between -2^63 and 2^62"]),
        (["--rate", "1", "--requests", "1", "--slo-ttft-ms", "0"], ["slo-ttft-ms", "0.0", "above 0"]),
        (["--rate", "1", "--requests", "1", "--timeout", "inf"], ["timeout", "inf", "finite"]),
        (["--rate", "1", "--requests", "1", "--temperature", "-1"], ["temperature", "-1.0", "at least 0"]),
        (["--rate", "1", "--requests", "1", "--figure", "x.pdf"], ["figure", "x.pdf", ".svg, .png"]),
        (["--rate", "1", "--requests", "1", "--url", "localhost:8000"], ["url", "localhost:8000", "http://"]),
        (["--rate", "1", "--requests", "1", "--url", "http://a:99999"], ["url", "http://a:99999", "must be"]),
        (["--rate", "1", "--requests", "1", "--url", "http://[a"], ["url", "http://[a", "must be"]),
        (["--rate", "1", "--requests", "1", "--url", "http://a", "--grpc", "a:1"], ["grpc", "a:1", "excludes --url"]),
        (["--rate", "1", "--requests", "1", "--url", "http://127.0.0.1:1"], ["http://127.0.0.1:1", "Cannot connect"]),
        (["--rate", "1", "--requests", "1", "--grpc", "127.0.0.1:1"], ["127.0.0.1:1", "UNAVAILABLE"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    refusals: Refusals, tmp_path: Path, arguments: list[str], named: list[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(TRACE)
    refusals.check(named, "bench", "serve", *(str(trace) if each == "FILE" else each for each in arguments))


def record(*text_at_s: float, due_s: float = 0.0, ended_s: float = 1.0, output: int | None = None) -> Record:
    usage = None if output is None else Usage(100, output)
    return Record(due_s, due_s + 0.25, text_at_s, ended_s, usage)


def failed(kind: str, message: str, *, refused: bool = False) -> Record:
    return Record(0.0, 0.0, (), 0.5, failure=FailedError(kind, message, refused=refused))


def test_figures_of_given_records() -> None:
    records = [
        record(1.0, 1.5, 2.5, ended_s=3.0, output=6),  # TTFT 1 s, gaps of 0.5 and 1 s, 1.5 s for 5 tokens
        record(4.0, due_s=2.0, ended_s=4.0, output=1),  # TTFT and E2E of 2 s, counted from when it was due
        record(due_s=5.0, ended_s=8.0),  # no text: its end is the first that the client learns
        failed("HTTP 500", "first"),
        failed("HTTP 500", "second"),
        failed("timeout", "slow"),
        failed("HTTP 429", "full", refused=True),
    ]
    figures = figures_of(records, Goals())
    assert (figures["requests"], figures["answered"], figures["refused"]) == (7, 3, 1)
    assert figures["errors"] == {"HTTP 500": {"count": 2, "first": "first"}, "timeout": {"count": 1, "first": "slow"}}
    # Percentiles between two values lie on the line between them.
    assert figures["ttft_ms"] == {"p50": 2000, "p90": 2800, "p99": 2980, "max": 3000}
    assert figures["itl_ms"] == {"p50": 750, "p90": 950, "p99": 995, "max": 1000}
    assert figures["tpot_ms"] == {"p50": 300, "p90": 300, "p99": 300, "max": 300}
    assert figures["e2e_ms"] == {"p50": 3000, "p90": 3000, "p99": 3000, "max": 3000}
    assert figures["seconds"] == 8
    assert figures["requests_per_s"] == 0.375
    assert (figures["usage_stated"], figures["input_tokens"], figures["output_tokens"]) == (2, 200, 7)
    assert (figures["input_tokens_per_s"], figures["output_tokens_per_s"]) == (25, 0.875)
    assert figures["sent_late_ms"]["max"] == 250
    assert figures["goodput"] is None


def test_figures_of_a_load_that_nobody_answered() -> None:
    figures = figures_of([failed("HTTP 429", "full", refused=True)], Goals(ttft_ms=1))
    assert figures["ttft_ms"] is figures["itl_ms"] is figures["tpot_ms"] is figures["e2e_ms"] is None
    assert figures["goodput"] == {"slo_ttft_ms": 1, "slo_itl_ms": None, "share": 0, "requests_per_s": 0}


def test_goodput_counts_requests_that_keep_every_goal() -> None:
    records = [
        record(0.5, 0.75, 1.0, ended_s=1.0),  # TTFT 500 ms, gaps of 250 ms
        record(0.5, 0.75, 1.5, ended_s=2.0),  # gaps of 500 ms in the mean
        record(1.5, 1.75, due_s=0.5, ended_s=4.0),  # TTFT 1000 ms
        failed("HTTP 500", "never good"),
    ]

    def goodput(**goals: float) -> tuple[float, float]:
        found = figures_of(records, Goals(**goals))["goodput"]
        return found["share"], found["requests_per_s"]

    assert goodput(ttft_ms=500) == (0.5, 0.5)
    assert goodput(itl_ms=250) == (0.5, 0.5)
    assert goodput(ttft_ms=500, itl_ms=250) == (0.25, 0.25)
    assert goodput(ttft_ms=1000, itl_ms=500) == (0.75, 0.75)
    assert goodput(ttft_ms=499) == (0, 0)


class HoldingClient:
    """Answers nobody before `expected` requests have come."""

    address = "held"

    def __init__(self, expected: int) -> None:
        self.expected, self.came = expected, 0
        self.questions: list[Question] = []

    async def models(self) -> list[str]:
        return ["model"]

    async def answer(self, question: Question) -> AsyncGenerator[Piece, None]:
        self.questions.append(question)
        while len(self.questions) < self.expected:
            await asyncio.sleep(0.001)
        yield Piece("text", Usage(1, 1))


ASKING = Asking("model", Prompts(0), temperature=0.0, seed=40)


def test_arrivals_do_not_wait_for_answers_and_latencies_count_from_the_plan() -> None:
    load = Load(rate=400.0, requests=20)
    client = HoldingClient(20)
    records = asyncio.run(Sender(client, ASKING, timeout_s=60, watch=lambda _: None).send(load))
    planned = list(load.planned())
    assert sorted(each.due_s for each in records) == [each.arrival_s for each in planned]
    assert all(each.sent_s >= each.due_s and each.failure is None for each in records)
    assert [question.seed for question in client.questions] == list(range(40, 60))
    assert [question.prompt for question in client.questions] == [ASKING.prompts.text(each) for each in planned]


def test_so_many_users_wait_at_once_and_never_more() -> None:
    seen = []
    client = HoldingClient(3)
    load = Load(concurrency=3, requests=10)
    asyncio.run(Sender(client, ASKING, timeout_s=60, watch=lambda r: seen.append(len(client.questions))).send(load))
    assert len(client.questions) == len(seen) == 10
    assert all(asked - ended <= 3 for ended, asked in enumerate(seen))
    # With one user more than requests that are answered together, nobody would be answered.
    starved = Sender(HoldingClient(4), ASKING, timeout_s=0.05, watch=lambda _: None)
    records = asyncio.run(starved.send(Load(concurrency=3, requests=3)))
    assert [each.failure and each.failure.kind for each in records] == ["timeout"] * 3


def test_users_stop_when_the_time_is_over() -> None:
    records = asyncio.run(
        Sender(HoldingClient(0), ASKING, timeout_s=60, watch=lambda _: None).send(Load(concurrency=2, duration_s=0.1))
    )
    assert len(records) >= 2
    assert sum(each.due_s >= 0.1 for each in records) <= 2  # a request of each user's may begin as the time ends
