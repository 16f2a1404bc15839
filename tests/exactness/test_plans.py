"""The tokens do not depend on the controller: whatever plans it draws, they are those of plain decoding."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.exactness.cases import AnyPlan, Case, models
from tests.random_models import random_tokens
from triforce_core.building.assembly import local_engine
from triforce_core.engine.acceptances import Acceptances
from triforce_core.engine.controller import Controller
from triforce_core.engine.engine import Engine
from triforce_core.engine.sequence import Request
from triforce_core.messages import (
    GREEDY,
    SCORED,
    Claim,
    Drafting,
    Origin,
    Proposal,
    Proposer,
    SamplingParams,
    Tally,
    Verdict,
    Work,
)
from triforce_core.plans import PLAIN, Plan
from triforce_core.speculation.decoder import SpeculativeDecoder
from triforce_core.speculation.lookup import Shadow

CASE = Case(0.8, 1.0, (6, 3), 128, 8, 5, 0.05, 0.1, (16, 200), 60)
REQUESTS, MOST = 4, 60


def engine(controller: type[Controller] | None) -> Engine:
    of_target, of_retrieval, drafter = models(CASE)
    it = local_engine(of_target, drafter, CASE.settings, of_retrieval)
    assert it.controller is not None
    it.controller = controller(CASE.lookaheads, tuple(Drafting), 8) if controller else None
    return it


def requests(seed: int, lookaheads: tuple[int, int] | None) -> list[Request]:
    return [
        Request(
            random_tokens(150 + 60 * n, seed=seed + n),
            MOST,
            SamplingParams((0.0, 0.7, 1.0, 0.7)[n]),
            seed=seed + n,
            lookaheads=lookaheads,
        )
        for n in range(REQUESTS)
    ]


def run(it: Engine, asked: list[Request]) -> tuple[list[tuple[int, ...]], set[int], set[str]]:
    """The tokens of each request, where tokens came from, and the kinds of plans."""
    tokens: dict[int, list[int]] = {it.submit(request): [] for request in asked}
    origins: set[int] = set()
    kinds: set[str] = set()
    while not it.idle:
        for output in it.run_once():
            tokens[output.sequence_id] += output.tokens
            origins |= set(output.origins)
            kinds |= set(output.stats.plans)
    return [tuple(each) for each in tokens.values()], origins, kinds


@pytest.fixture(scope="module")
def engines() -> tuple[Engine, Engine, Engine]:
    return engine(None), engine(AnyPlan), engine(Controller)


def any_plan_of(engines: tuple[Engine, Engine, Engine]) -> AnyPlan:
    controller = engines[1].controller
    assert isinstance(controller, AnyPlan)
    return controller


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**20))
def test_any_plans_give_the_tokens_of_plain_decoding(engines: tuple[Engine, Engine, Engine], seed: int) -> None:
    plain, any_plan, own = engines
    any_plan_of(engines).rng.seed(seed)
    expected = [run(plain, [request])[0][0] for request in requests(seed, (0, 0))]
    assert run(any_plan, requests(seed, None))[0] == expected
    assert run(own, requests(seed, None))[0] == expected


class AnyTrees:
    """A drafter that turns what its model drafts into a tree of any shape, with wrong tokens anywhere."""

    def __init__(self, drafter: Proposer, seed: int) -> None:
        self.drafter, self.rng, self.nodes = drafter, random.Random(seed), dict[int, int]()
        self.shapes: set[tuple[int, ...]] = set()

    def submit(self, work: list[Work]) -> None:
        self.nodes |= {w.span.sequence_id: w.nodes for w in work}
        self.drafter.submit(work)

    def collect(self, timeout_s: float) -> list[Proposal]:
        return [self.grown(proposal) for proposal in self.drafter.collect(timeout_s)]

    def grown(self, proposal: Proposal) -> Proposal:
        rng, tree = self.rng, proposal.tree
        tokens, parents = [*tree.tokens], [*tree.parents]
        while tokens and len(tokens) < self.nodes[proposal.sequence_id] and rng.random() < 0.8:
            tokens.append(rng.choice([*tree.tokens, rng.randrange(256)]))
            parents.append(rng.randrange(-1, len(parents)))
        self.shapes.add(tuple(parents))
        origins = proposal.origins[:1] * len(tokens)
        return replace(proposal, tokens=tuple(tokens), parents=tuple(parents), origins=origins)

    def release(self, sequence_ids: list[int]) -> None:
        self.drafter.release(sequence_ids)


def test_any_trees_give_the_tokens_of_plain_decoding(engines: tuple[Engine, Engine, Engine]) -> None:
    """Whatever a drafting tier proposes."""
    plain, grown = engines[0], engine(AnyPlan)
    assert isinstance(grown.decoder, SpeculativeDecoder)
    assert isinstance(grown.decoder.proposer, SpeculativeDecoder)
    trees = grown.decoder.proposer.proposer = AnyTrees(grown.decoder.proposer.proposer, seed=1)
    verifier, siblings = grown.decoder.proposer.verifier, 0
    verify = verifier.verify

    def counted(claims: list[Claim]) -> list[Verdict]:
        nonlocal siblings
        verdicts = verify(claims)
        for claim, verdict in zip(claims, verdicts, strict=True):
            accepted = verdict.tokens[: verdict.num_accepted]
            siblings += accepted != claim.tree.first_path().tokens[: len(accepted)]
        return verdicts

    verifier.verify = counted  # type: ignore[method-assign]
    for seed in range(6):
        expected = [run(plain, [request])[0][0] for request in requests(seed, (0, 0))]
        assert run(grown, requests(seed, None))[0] == expected
    assert siblings > 20
    assert len(trees.shapes) > 100


def test_all_kinds_of_plans_were_drawn(engines: tuple[Engine, Engine, Engine]) -> None:
    any_plan_of(engines).rng.seed(0)
    looping = [replace(request, sampling=GREEDY, max_tokens=200) for request in requests(1, None)]
    _, origins, kinds = run(engines[1], looping)
    assert origins == set(map(int, Origin))
    assert kinds == {"plain", "retrieval"} | {
        f"{above}{drafter}" for above in ("", "retrieval+") for drafter in ("model", "lookup", "both")
    }


def test_a_request_may_pin_its_plan(engines: tuple[Engine, Engine, Engine]) -> None:
    [request] = requests(3, (4, 2))[1:2]
    _, _, kinds = run(engines[2], [replace(request, drafting=Drafting.LOOKUP)])
    assert kinds == {"retrieval+lookup"}


@pytest.mark.parametrize("looks_up", [True, False])
def test_prompt_lookup_is_scored_while_decoding_is_plain(looks_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is drafted. Still, the controller knows what lookup would have found, if there is a tier that
    looks up.
    """

    class AlwaysPlain(Controller):
        def plan(self, *_: object) -> Plan:
            return PLAIN

    it = engine(AlwaysPlain)
    assert it.controller is not None
    it.controller.looks_up = looks_up
    [request] = requests(0, None)[:1]
    asked, score_of = 0, Shadow.score

    def score(self: Shadow, tokens: list[int]) -> Tally:
        nonlocal asked
        asked += 1
        return score_of(self, tokens)

    monkeypatch.setattr(Shadow, "score", score)
    run(it, [replace(request, prompt=(1, 2, 3, 4, 5, 6) * 20, sampling=GREEDY)])
    assert set(it.controller.rounds) == {"plain"}
    assert asked <= MOST / SCORED + 1, "most plain rounds cost nothing more"
    chances = it.controller.known.get(0, Acceptances()).chances
    assert looks_up <= chances["found"].times <= MOST // SCORED * looks_up
    assert (chances["lookup_first"].times > 0) is looks_up
