"""What a scrape of a real server says after requests whose figures are known."""

from __future__ import annotations

import time

import pytest
import requests

from deploy.metrics import FRESH_S
from tests.serve.conftest import Server
from tests.unit.deploy.test_metrics import Series, scraped


def fresh(server: Server) -> dict[str, Series]:
    time.sleep(FRESH_S + 0.1)
    return scraped(requests.get(f"{server.url}/metrics", timeout=10).text)


def test_a_server_s_metrics_agree_with_its_answers(server: Server) -> None:
    def total(found: dict[str, Series], name: str, labels: tuple[str, ...]) -> float:
        return sum(value for at, value in found.get(name, {}).items() if at[len(at) - len(labels) :] == labels)

    def grown(name: str, *labels: str) -> float:
        return total(after, name, labels) - total(before, name, labels)

    server.complete(max_tokens=1)
    before = fresh(server)
    asked = {"max_tokens": 60, "temperature": 0.8, "speculation": {"lookaheads": [6, 2]}}
    answers = [server.complete(seed=seed, **asked).json() for seed in range(3)]
    with server.stream(seed=9, max_tokens=8000) as stream:
        next(stream.iter_lines())
    server.wait_idle()
    after = fresh(server)
    usages = [answer["usage"] for answer in answers]
    assert grown("requests_total", "length") + grown("requests_total", "stop") == 3
    assert grown("requests_total", "cancelled") == 1
    assert grown("generation_tokens_total") > sum(usage["completion_tokens"] for usage in usages)
    assert grown("prompt_tokens_total") == 4 * usages[0]["prompt_tokens"]
    for name in ("tier_passes_total", "tier_pass_seconds_total"):
        assert all(grown(name, tier) > 0 for tier in ("draft", "retrieval", "target"))
    assert set(after["tier_ready"].values()) == {1}
    assert after["kv_cache_used_tokens"].keys() == after["kv_cache_capacity_tokens"].keys()
    assert [*after["num_requests_running"].values()] == [0]


def test_acceptance_by_tier_is_that_of_the_answer(server: Server) -> None:
    server.wait_idle()
    before = fresh(server)
    answer = server.complete(
        max_tokens=80, temperature=0.8, seed=4, ignore_eos=True, speculation={"lookaheads": [6, 2]}
    )
    assert answer.status_code == 200
    said = answer.json()["triforce"]
    after = fresh(server)
    for tier in ("retrieval", "draft"):
        accepted, verified = (
            next(value - before.get(name, {}).get(at, 0) for at, value in after[name].items() if at[1] == tier)
            for name in ("spec_decode_num_accepted_tokens_total", "spec_decode_num_verified_tokens_total")
        )
        assert accepted / verified == pytest.approx(said["acceptance"][tier])
    [replica] = [at[0] for at in after["tokens_per_round_count"]]
    rounds = {at[1]: value - before["rounds_total"].get(at, 0) for at, value in after["rounds_total"].items()}
    assert {plan: count for plan, count in rounds.items() if count} == said["controller"]["rounds"]
    tokens, count = (
        after[f"tokens_per_round_{part}"][(replica,)] - before[f"tokens_per_round_{part}"][(replica,)]
        for part in ("sum", "count")
    )
    assert tokens / count == pytest.approx(said["tokens_per_round"])
