"""Whatever the settings name as the drafter is what drafts, in one process and in an actor, and changes no token."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from actors.tiers import DraftActor
from tests.conftest import HeldOut
from triforce_core.building.assembly import local_engine
from triforce_core.building.drafters import DRAFTERS, Drafter, drafter_for, drafter_weights
from triforce_core.building.inspection import held_of, runners_of
from triforce_core.building.loading import load_local_engine
from triforce_core.config import Settings, load_settings
from triforce_core.engine.engine import run_to_end
from triforce_core.engine.sequence import Request
from triforce_core.errors import TriForceError
from triforce_core.messages import GREEDY, Origin, SamplingParams, SequenceSpec, Span, Tier, Work
from triforce_core.models.load import load_model
from triforce_core.speculation.leaf import Leaf

NAMES = ["demo", *DRAFTERS]
TEXT = tuple(b"the cat and the dog and the cat and the ")
SPEC = SequenceSpec(GREEDY, seed=0, prompt_length=len(TEXT), max_length=len(TEXT) + 100)


def settings_with(drafter: str) -> Settings:
    sizes = {"retrieval": {"budget": 256, "refresh_every": 16}, "target": {"kv_pool_tokens": 4096}}
    return load_settings(dtype="float32", max_sequences=2, draft={"model": drafter}, **sizes)


def made(name: str) -> Drafter:
    settings = settings_with(name)
    weights = drafter_weights(settings)
    return drafter_for(settings, None if weights is None else load_model(weights, "drafter", "float32", "cpu"))


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return load_model("demo", "target", "float32", "cpu")


def test_a_name_that_is_no_drafter_s_is_a_model_s() -> None:
    assert {name: drafter_weights(settings_with(name)) for name in NAMES} == {"demo": "demo"} | dict.fromkeys(DRAFTERS)
    assert made("demo").runner is not None
    assert made("ngram").runner is None
    with pytest.raises(TriForceError, match="nosuch"):
        load_local_engine(settings_with("nosuch"))


def test_without_its_weights_a_model_leaves_drafting_to_prompt_lookup() -> None:
    drafter = drafter_for(settings_with("demo"), None)
    assert isinstance(drafter, Leaf)
    assert drafter.runner is None


@pytest.mark.parametrize("name", NAMES)
def test_every_work_gets_one_answer_of_at_most_the_tokens_asked_for(name: str) -> None:
    drafter = made(name)
    assert isinstance(drafter, Drafter)
    for lookahead in (0, 1, 5):
        drafter.submit([Work(Span(n, 0, TEXT, SPEC), (lookahead,)) for n in (1, 2)])
        answers = drafter.collect(0.0)
        assert sorted(answer.sequence_id for answer in answers) == [1, 2]
        for answer in answers:
            assert answer.start == len(TEXT)
            assert len(answer.tokens) <= lookahead
            origin = Origin.LOOKUP if name == "ngram" else Origin.DRAFT
            assert answer.origins == bytes([origin]) * len(answer.tokens)
    drafter.release([1, 2, 3])
    assert len(drafter.held) == 0
    assert not drafter.collect(0.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_no_drafter_changes_a_token(target: PreTrainedModel, held_out: HeldOut, name: str, temperature: float) -> None:
    settings, prompt = settings_with(name), held_out("turtle.py", 300)
    drafter = load_model("demo", "drafter", "float32", "cpu") if name == "demo" else None
    engine = local_engine(target, drafter, settings)
    plain, drafted = (
        [
            token
            for output in run_to_end(engine, [Request(prompt, 40, SamplingParams(temperature), 3, lookaheads)])
            for token in output.tokens
        ]
        for lookaheads in ((0, 0), (8, 3))
    )
    assert drafted == plain


def test_a_new_entry_is_all_that_a_new_drafter_needs(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter is used in one process, in the draft actor, and inside another tier's actor."""
    new = Leaf()
    monkeypatch.setitem(DRAFTERS, "new", lambda: new)
    settings = settings_with("new")
    engine = local_engine(target, None, settings)
    assert held_of(engine)[Tier.DRAFT] is new.held
    assert Tier.DRAFT not in runners_of(engine)
    assert DraftActor(settings).proposer() is new
    assert held_of(load_local_engine(settings))[Tier.DRAFT] is new.held
