"""The code of docs/extending.md runs, and keeps the rules of what it extends."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import HeldOut
from tests.random_models import plain_logits, random_pair, random_tokens
from tests.stating import Statement, ask, assert_logits, full_kv, full_runner, geometry
from triforce_core.attention import KERNELS
from triforce_core.building.drafters import DRAFTERS, Drafter
from triforce_core.building.inspection import held_of
from triforce_core.building.loading import load_local_engine
from triforce_core.config import load_settings
from triforce_core.engine.engine import run_to_end
from triforce_core.engine.sequence import Request
from triforce_core.kv.base import Lack
from triforce_core.kv.cutting import SnapshotCutter
from triforce_core.kv.snapshot import ChunkSettings
from triforce_core.messages import GREEDY, Tier
from triforce_core.models.runner import ModelRunner

PAGE = Path(__file__).resolve().parents[4] / "docs" / "extending.md"


@cache
def defined_in(file: str) -> dict[str, Any]:
    """What the page's code for a new file defines."""
    [code] = [code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if file in code]
    names: dict[str, Any] = {"__name__": __name__}  # of a module that is loaded, as dataclasses need
    exec(code, names)
    return names


def test_the_drafter_drafts_and_changes_no_token(held_out: HeldOut, monkeypatch: pytest.MonkeyPatch) -> None:
    made = defined_in("# triforce_core/speculation/last_token.py")["LastTokenProposer"]
    monkeypatch.setitem(DRAFTERS, "last_token", made)
    settings = load_settings(
        dtype="float32", max_sequences=1, draft={"model": "last_token"}, target={"kv_pool_tokens": 2048}
    )
    engine = load_local_engine(settings, drafting=True)
    assert isinstance(made(), Drafter)
    assert len(held_of(engine)[Tier.DRAFT]) == 0
    prompt = held_out("turtle.py", 300)
    plain, drafted = ([*run_to_end(engine, [Request(prompt, 60, GREEDY, 0, n)])] for n in ((0, 0), (0, 3)))
    assert [t for output in drafted for t in output.tokens] == [t for output in plain for t in output.tokens]
    assert drafted[-1].stats.tallies[0].proposed > 0


def test_the_selector_goes_by_the_first_key_of_each_chunk() -> None:
    selector = defined_in("# triforce_core/kv/selectors/first_key.py")["FirstKey"]()
    pair, text = random_pair(), random_tokens(100, seed=1)
    runner = full_runner(pair, 200)
    ask(runner, Statement(1, text))
    kv, chunks = full_kv(runner), ChunkSettings(32, 8, 8)
    assert kv.cut(1, len(text), chunks, selector).num_tokens <= 32
    local_start, num_chosen = chunks.split(len(text))
    [(start, _)] = kv.held[1].ranges
    with torch.inference_mode():
        choice = SnapshotCutter(kv, kv.held[1], len(text), chunks, selector).choose()
        for layer in range(kv.geometry.num_layers):
            queries = kv.held[1].queries.of(layer)
            first = kv.keys[layer][:, start : start + local_start : 8]
            logits = torch.einsum("kgd,kcd->kgc", queries[:, -1].unflatten(0, (2, 2)), first) / 4
            wanted = logits.softmax(-1).mean(1)
            wanted[:, 0] = torch.inf
            assert torch.equal(choice[layer, :, :num_chosen], wanted.topk(num_chosen).indices.sort(-1).values)


def test_the_cache_policy_holds_short_texts_and_no_long_ones() -> None:
    pair, text = random_pair(), random_tokens(60, seed=1)
    policy = defined_in("# triforce_core/kv/short.py")["ShortKV"]
    runner = ModelRunner(pair.ours, policy(geometry(pair), 2, 40, KERNELS["cpu_flash"]))
    for end in (20, 30, 25, 40):
        assert_logits(ask(runner, Statement(1, text[:end]))[1], plain_logits(pair.theirs, text[:end])[-1:])
    assert ask(runner, Statement(1, text))[1] == Lack()
    assert_logits(ask(runner, Statement(1, text[:40]))[1], plain_logits(pair.theirs, text[:40])[-1:])
