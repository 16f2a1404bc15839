"""The tokens are those of plain decoding whichever selector chooses the chunks, also where one batch has several."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from transformers import PreTrainedModel

from tests.exactness.cases import finish
from tests.random_models import random_model, random_tokens, with_noise
from triforce_core.building.assembly import local_engine
from triforce_core.config import Settings, load_settings
from triforce_core.engine.engine import Engine
from triforce_core.engine.sequence import Request
from triforce_core.errors import InvalidValueError
from triforce_core.kv.selectors import SELECTORS, Selector
from triforce_core.kv.snapshot import ChunkSettings, Snapshot
from triforce_core.messages import SamplingParams
from triforce_core.models.load import ATTENTION

NUM_TOKENS = 48


@cache
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    """Target and drafter."""
    target = random_model(seed=2)
    target.set_attn_implementation(ATTENTION)
    return target, with_noise(target, 0.1)


def settings(selector: str = "mean_key", graphs: str = "off") -> Settings:
    return load_settings(
        dtype="float32",
        max_sequences=len(SELECTORS),
        graphs=graphs,
        target={"kv_pool_tokens": 4096, "prefill_chunk": 150},
        retrieval={"budget": 160, "refresh_every": 16, "selector": selector},
    )


def engine(of: Settings) -> Engine:
    target, drafter = models()
    return local_engine(target, drafter, of)


def request(temperature: float, selector: str | None = None, number: int = 0) -> Request:
    prompt = random_tokens(330 + 7 * number, seed=number)
    return Request(prompt, NUM_TOKENS, SamplingParams(temperature), number, (6, 2), selector=selector)


@cache
def plainly(*requests: Request) -> list[tuple[int, ...]]:
    it = engine(settings())
    return [finish(it, [replace(each, lookaheads=(0, 0), selector=None)]).tokens[0] for each in requests]


class CutRecorder:
    """Notes by which selector the snapshots of each sequence are cut."""

    def __init__(self, it: Engine) -> None:
        self.kv, self.cuts = it.snapshots.kv, list[tuple[int, Selector]]()
        it.snapshots.kv = self

    def cut(
        self, sequence_id: int, position: int, chunks: ChunkSettings, selector: Selector, base: int = 0
    ) -> Snapshot:
        self.cuts.append((sequence_id, selector))
        return self.kv.cut(sequence_id, position, chunks, selector, base)


@pytest.mark.parametrize(
    ("name", "temperature", "graphs"),
    [*product(SELECTORS, (0.0, 0.8), ("off",)), ("h2o", 0.8, "eager"), ("snapkv", 0.0, "eager")],
)
def test_the_tokens_are_those_of_plain_decoding(name: str, temperature: float, graphs: str) -> None:
    it, asked = engine(settings(name, graphs)), request(temperature)
    recorder = CutRecorder(it)
    outcome = finish(it, [asked])
    assert outcome.tokens == plainly(asked)
    assert len(set(outcome.tokens[0])) > NUM_TOKENS // 3, "a text that repeats itself proves little"
    assert len(recorder.cuts) > 2, "refreshed in mid-stream"
    assert {selector for _, selector in recorder.cuts} == {SELECTORS[name]()}, "requests that name none get the setting"
    target, _, _ = outcome.tallies[0]
    assert target.accepted > 0


def test_requests_with_different_selectors_share_a_batch() -> None:
    requests = [request(0.8, name, number) for number, name in enumerate(SELECTORS)]
    it = engine(settings("streaming"))
    recorder = CutRecorder(it)
    assert finish(it, requests).tokens == plainly(*requests)
    by_sequence: dict[int, set[Selector]] = {}
    for sequence_id, selector in recorder.cuts:
        by_sequence.setdefault(sequence_id, set()).add(selector)
    assert [by_sequence[i] for i in sorted(by_sequence)] == [{SELECTORS[name]()} for name in SELECTORS]


def test_a_request_that_never_gets_a_snapshot_keeps_nothing_for_one() -> None:
    it = engine(settings("h2o"))
    plain = it.submit(replace(request(0.0), lookaheads=(0, 3)))
    sparse = it.submit(request(0.0))
    while it.scheduler.kv.used_tokens < 2 * 330:
        it.run_once()
    held = it.scheduler.kv.held  # type: ignore[attr-defined]
    assert not held[plain].mass
    assert held[sparse].mass


def test_an_unknown_selector_is_refused() -> None:
    names = "must be one of " + ", ".join(SELECTORS)
    with pytest.raises(InvalidValueError, match=f"selector.*best.*{names}"):
        engine(settings()).submit(request(0.0, "best"))
    with pytest.raises(InvalidValueError, match=r"retrieval\.selector.*best"):
        settings("best")
