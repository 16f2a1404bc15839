"""The audit finds a defect of verifying passes within a few blocks, finds none where there is none, leaves no trace."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict

import pytest
import torch
from torch import Tensor

from tests.exactness.cases import finish
from tests.random_models import random_model, random_tokens, with_noise
from triforce_core.building.assembly import local_engine
from triforce_core.building.inspection import audit_of
from triforce_core.config import Settings
from triforce_core.engine.engine import Engine
from triforce_core.engine.sequence import Output, Request
from triforce_core.kv.base import Batch, Forward
from triforce_core.kv.full import FullKV
from triforce_core.messages import GREEDY, SamplingParams
from triforce_core.models.audit import AuditCounts
from triforce_core.models.load import ATTENTION
from triforce_core.models.runner import ModelRunner

SAMPLING = SamplingParams(0.8, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.2, min_tokens=4)


def engine(audit: float, pool: int = 8192, exact: str = "auto") -> Engine:
    settings = Settings.model_validate(
        {
            "dtype": "float32",
            "exact": exact,
            "max_sequences": 4,
            "target": {"kv_pool_tokens": pool, "audit": audit},
            "retrieval": {"budget": 64, "chunk": 8, "refresh_every": 8},
        }
    )
    target = random_model()
    target.set_attn_implementation(ATTENTION)
    return local_engine(target, with_noise(target, 0.1), settings, with_noise(target, 0.05))


def requests(count: int, length: int, more: int) -> list[Request]:
    return [Request(random_tokens(length + i, seed=i), more, SAMPLING, i, (6, 2)) for i in range(count)]


def counts(engine: Engine) -> AuditCounts:
    found = audit_of(engine)
    assert found is not None
    return found


def test_an_audited_run_is_the_same_run() -> None:
    """The audit's passes leave KV, kept queries, penalties' counts and the pool as they were."""
    plain, audited = engine(0), engine(1)
    for it in (plain, audited):
        for request in requests(4, 150, 80):
            it.submit(request)
    outputs: list[list[Output]] = [[], []]
    while not plain.idle:
        for it, found in zip((plain, audited), outputs, strict=True):
            found.extend(it.run_once())
        before, after = kv_of(plain), kv_of(audited)
        assert before.allocator.free_ranges == after.allocator.free_ranges
        for sequence_id, held in before.held.items():
            ours, theirs = after.held[sequence_id].queries, held.queries
            assert ours.positions == theirs.positions
            assert all(torch.equal(ours.of(layer), theirs.of(layer)) for layer in range(theirs.num_layers))
            for start, stop in held.ranges:
                for ours, theirs in zip((*after.keys, *after.values), (*before.keys, *before.values), strict=True):
                    used = slice(start, min(stop, start + held.cached))
                    assert torch.equal(ours[:, used], theirs[:, used])
    assert counts(audited).blocks > 50
    for name in ("tokens", "origins", "finish_reason"):
        assert [getattr(o, name) for o in outputs[0]] == [getattr(o, name) for o in outputs[1]]


def kv_of(engine: Engine) -> FullKV:
    kv = engine.decoder.verifier.runner.kv  # type: ignore[attr-defined]
    assert isinstance(kv, FullKV)
    return kv


@pytest.mark.parametrize(("share", "blocks"), [(1.0, 1.0), (0.5, 0.5), (0.1, 0.1)])
def test_the_share_of_blocks_is_computed_again(share: float, blocks: float) -> None:
    it = engine(share)
    outcome = finish(it, requests(3, 100, 60))
    rounds = sum(levels[0].rounds for levels in outcome.tallies) + 3  # the first tokens are audited as well
    assert abs(counts(it).blocks - blocks * rounds) <= 1
    assert counts(it).tokens >= counts(it).blocks


def test_where_the_pool_is_full_blocks_are_skipped() -> None:
    it = engine(1, pool=160)
    finish(it, requests(1, 100, 60))
    assert counts(it).blocks == 0
    assert counts(it).skipped > 5
    assert it.scheduler.kv.used_tokens == 0


def check_honest(audited: Engine, blocks: int) -> None:
    seed = 0
    while counts(audited).blocks < blocks:
        batch = [Request(random_tokens(80, seed=seed + i), 200, SAMPLING, seed + i, (6, 2)) for i in range(4)]
        finish(audited, batch)
        seed += 4
    found = counts(audited)
    print(f"\n{found}")
    assert found.mismatches == found.skipped == 0


def test_honest_blocks_do_not_differ() -> None:
    check_honest(engine(1), 200)


@pytest.mark.slow
def test_thousands_of_honest_blocks_do_not_differ() -> None:
    check_honest(engine(1), 5000)


@pytest.mark.ci
@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(1.0, top_k=10), SamplingParams(1.0, top_p=0.6), SamplingParams(0.05), GREEDY],
    ids=["top_k", "top_p", "cold", "greedy"],
)
def test_rounding_in_16_bits_is_no_defect(sampling: SamplingParams) -> None:
    """Without `exact` the audit reports none, even if rounding moves a token over the edge of top-k or top-p, or if a
    low temperature makes gaps large.
    """
    it = rounded("off", sampling)
    assert counts(it).mismatches == 0
    assert counts(it).largest_difference > 0
    json.dumps(asdict(counts(it)), allow_nan=False)


@pytest.mark.parametrize("sampling", [SamplingParams(1.0, top_p=0.6), GREEDY], ids=["top_p", "greedy"])
def test_an_exact_target_differs_by_no_bit(sampling: SamplingParams) -> None:
    found = counts(rounded("on", sampling))
    assert found.rounding == found.ties == found.mismatches == found.largest_difference == 0


def rounded(exact: str, sampling: SamplingParams) -> Engine:
    """An engine that has audited a run in bfloat16."""
    given = {"dtype": "bfloat16", "exact": exact, "max_sequences": 4, "target": {"audit": 1}}
    target = random_model().bfloat16()
    target.set_attn_implementation(ATTENTION)
    drafter, self_drafter = with_noise(target, 0.1), with_noise(target, 0.05)
    it = local_engine(target, drafter, Settings.model_validate(given), self_drafter)
    finish(it, [Request(random_tokens(80, seed=i), 150, sampling, i, (6, 2)) for i in range(4)])
    print(f"\n{counts(it)}")
    assert counts(it).blocks > 100
    return it


class DefectiveRunner(ModelRunner):
    """In passes over several tokens of a sequence, this runner does not see the first half of the text."""

    def forward(self, forwards: list[Forward]) -> tuple[Tensor, Batch]:
        place = self.kv.place  # type: ignore[attr-defined]

        def blind(sequence_id: int, held: object, keep: int, end: int, num_sampled: int) -> object:
            placed = place(sequence_id, held, keep, end, num_sampled)
            if num_sampled > 1:
                start, stop = placed.visible[0]
                placed.visible[0] = ((start + stop) // 2, stop)
            return placed

        self.kv.place = blind  # type: ignore[attr-defined]
        try:
            return super().forward(forwards)
        finally:
            self.kv.place = place  # type: ignore[attr-defined]


def test_a_defect_of_the_verifying_pass_is_found(caplog: pytest.LogCaptureFixture) -> None:
    it = engine(1)
    it.decoder.verifier.runner.__class__ = DefectiveRunner  # type: ignore[attr-defined]
    with caplog.at_level(logging.INFO):
        finish(it, requests(2, 150, 60))
    found = counts(it)
    print(f"\n{found}")
    assert found.mismatches > 0
    assert found.blocks <= 100
    assert found.rounding < found.largest_difference < float("inf")
    assert any("a defect" in record.message for record in caplog.records if record.levelno == logging.ERROR)


def test_a_tie_is_told_from_a_defect(caplog: pytest.LogCaptureFixture) -> None:
    """Without `exact`, where two candidates are as good as equal, tokens differ, and logits do not."""
    it = engine(1, exact="off")
    audit = it.decoder.verifier.audit  # type: ignore[attr-defined]
    perturbed = audit.drawer.perturbed
    noise = torch.Generator().manual_seed(0)

    def tied(logits: dict[int, Tensor]) -> Tensor:
        """Bring the two best candidates of each row within 2e-5 of each other, in either order."""
        values = perturbed(logits)
        best = values.topk(2).indices
        rows = torch.arange(len(values))
        values[rows, best[:, 1]] = values[rows, best[:, 0]] + 2e-5 * torch.rand(len(values), generator=noise).sub(0.5)
        return values

    audit.drawer.perturbed = tied
    with caplog.at_level(logging.INFO):
        finish(it, requests(2, 150, 40))
    assert counts(it).ties > 5
    assert counts(it).mismatches == 0
    assert 0 < counts(it).largest_difference < 1e-4
    assert any("a tie of rounding" in record.message for record in caplog.records)


def test_audits_are_refused_where_there_are_none() -> None:
    for other in ({"offload": "host"}, {"tensor_parallel": 2}):
        with pytest.raises(ValueError, match=r"audit 0.5 must be 0 with offload or tensor_parallel"):
            Settings.model_validate({"target": {"audit": 0.5, **other}})
