"""What a scrape says after scripted requests, whose figures are known."""

from __future__ import annotations

import asyncio
import json
import re
import time
from contextlib import aclosing
from itertools import pairwise
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from deploy.calls import Call, begin
from deploy.metrics import FRESH_S, GAPS, LATENCIES
from deploy.openai_api.routes import http_app
from deploy.service import Service
from scripts.site_hooks import metrics
from tests.packages import REPOSITORY
from tests.scripted import Scripted, ask, event, events_of, ids, model, served, wanted
from triforce_core._gen.triforce.v1 import generation_pb2 as gen
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import load_settings
from triforce_core.errors import UnavailableError

LENGTH = gen.FINISH_REASON_LENGTH
Series = dict[tuple[str, ...], float]


def scraped(text: str) -> dict[str, Series]:
    """The values by the name of the sample without `triforce_`, and then by the sample's labels: the replica, if it has
    one, and its others.
    """
    found: dict[str, Series] = {}
    for family in text_string_to_metric_families(text):
        assert family.type != "unknown", family.name
        assert family.documentation, family.name
        for sample in family.samples:
            own = dict(sample.labels)
            assert own.pop("model_name") == "demo"
            of_replica = [own.pop("replica")] if "replica" in own else []
            labels = (*of_replica, *own.values())
            series = found.setdefault(sample.name.removeprefix("triforce_"), {})
            assert labels not in series, f"twice: {sample}"
            series[labels] = sample.value
    return found


def scrape(client: TestClient) -> dict[str, Series]:
    answer = client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return scraped(answer.text)


# -- the gateway's own -------------------------------------------------------------------------------------------------


def test_before_any_request_all_is_zero() -> None:
    client, service, _ = served()
    found = scrape(client)
    assert "requests_total" not in found
    assert found["places"] == {(): service.room}
    assert found["time_to_first_token_seconds_count"] == {(): 0}
    assert not [name for name in found if name.endswith("_created")]


def test_requests_are_counted_by_how_they_ended() -> None:
    client, *_ = served(event(ids("a b")), event(ids(" c"), LENGTH))
    tokens = len(ids("a b")) + len(ids(" c"))
    assert ask(client).status_code == 200
    assert ask(client, stream=True).status_code == 200
    assert ask(client, stop="b").status_code == 200
    assert ask(client, model="another").status_code == 404
    assert ask(client, max_tokens=0).status_code == 400
    found = scrape(client)
    assert found["requests_total"][("length",)] == 2
    assert found["requests_total"][("stop",)] == 1
    assert found["requests_total"][("model_not_found",)] == 1
    assert found["prompt_tokens_total"] == {(): 3 * len(ids("def"))}
    assert 2 * tokens < found["generation_tokens_total"][()] < 3 * tokens, "no tokens behind the stop string"
    assert found["time_to_first_token_seconds_count"] == found["e2e_request_latency_seconds_count"] == {(): 3}
    assert found["requests_in_flight"] == {(): 0}


def test_every_error_has_the_code_that_the_client_gets() -> None:
    client, *_ = served(RuntimeError("unforeseen"))
    codes = [ask(client).json()["error"]["code"]]
    assert scrape(client)["requests_total"] == {("internal_error",): 1}
    client, *_ = served(event(ids("a")), UnavailableError("it is gone"))
    answers = [ask(client).json(), events_of(ask(client, stream=True))[-1]]
    codes += [answer["error"]["code"] for answer in answers]
    assert scrape(client)["requests_total"] == {("engine_crash",): 2}
    client, *_ = served(5.0)
    codes.append(ask(client, timeout_s=0.05).json()["error"]["code"])
    found = scrape(client)
    assert found["requests_total"] == {("timeout",): 1}
    assert found["e2e_request_latency_seconds_count"] == {(): 0}, "the time of what failed is no latency"
    assert codes == ["internal_error", "engine_crash", "engine_crash", "timeout"]


def test_what_its_client_leaves_is_cancelled_and_its_tokens_count() -> None:
    async def left() -> tuple[dict[str, Series], dict[str, Series]]:
        _, service, _ = served(event(ids("a")), 5.0)
        async with aclosing(service.complete(wanted())) as parts:
            await anext(parts)
            during = scraped((await service.scrape.text()).decode())
        return during, scraped((await service.scrape.text()).decode())

    during, after = asyncio.run(left())
    assert during["requests_in_flight"] == {(): 1}
    assert "requests_total" not in during
    assert after["requests_in_flight"] == {(): 0}
    assert after["requests_total"] == {("cancelled",): 1}
    assert after["generation_tokens_total"] == {(): len(ids("a"))}


def test_who_takes_the_last_part_and_nothing_more_has_finished() -> None:
    """The stream of events does so: it closes its source after the last part."""

    async def taken() -> dict[str, Series]:
        _, service, _ = served(event(ids("a"), LENGTH))
        parts = service.complete(wanted())
        await anext(parts)
        await parts.aclose()
        return scraped((await service.scrape.text()).decode())

    assert asyncio.run(taken())["requests_total"] == {("length",): 1}


def test_each_completion_of_several_counts() -> None:
    async def several() -> dict[str, Series]:
        _, service, _ = served(event(ids("a")), event(ids(" b"), LENGTH))
        assert [part async for part in service.complete(wanted(n=3))]
        return scraped((await service.scrape.text()).decode())

    found = asyncio.run(several())
    assert found["requests_total"] == {("length",): 3}
    assert found["prompt_tokens_total"] == {(): len(ids("def"))}, "of all of them once, as in `usage`"
    assert found["inter_token_latency_seconds_count"] == {(): 3}


def test_every_prompt_of_a_list_counts_once_and_one_that_is_only_read_too() -> None:
    prompts = ["def", "a b c d", "x y z"]
    client, *_ = served(event(ids("a")), event(ids(" b"), LENGTH))
    usage = ask(client, prompt=prompts, n=2).json()["usage"]
    assert (
        scrape(client)["prompt_tokens_total"] == {(): usage["prompt_tokens"]} == {(): sum(map(len, map(ids, prompts)))}
    )
    client, *_ = served(event(ids("a"), LENGTH))
    assert ask(client, echo=True, max_tokens=0).status_code == 200
    assert scrape(client)["prompt_tokens_total"] == {(): len(ids("def"))}


def test_the_first_token_is_timed_from_the_call_s_arrival() -> None:
    async def late() -> dict[str, Series]:
        _, service, _ = served(event(ids("a"), LENGTH))
        begin(Call("http", "POST /v1/chat/completions"))
        await asyncio.sleep(0.2)  # as the rendering of a chat takes, before the service sees it
        assert [part async for part in service.complete(wanted())]
        return scraped((await service.scrape.text()).decode())

    found = asyncio.run(late())
    assert found["time_to_first_token_seconds_sum"][()] >= 0.2
    assert found["e2e_request_latency_seconds_sum"][()] >= 0.2


def test_calls_are_counted_by_status_refused_ones_too() -> None:
    _, service, _ = served()
    for call in (Call("http", status=401), Call("http", status=401), Call("grpc", status="OK"), Call("http")):
        service.ended(call)
    found = scraped(asyncio.run(service.scrape.text()).decode())
    assert found["calls_total"] == {("http", "401"): 2, ("grpc", "OK"): 1, ("http", "cancelled"): 1}


def test_times_are_those_between_parts() -> None:
    client, *_ = served(0.2, event(ids("a")), 0.1, event(ids(" b")), 0.1, event(ids(" c"), LENGTH))
    assert ask(client).status_code == 200
    found = scrape(client)
    first_s, gaps_s, whole_s, token_s = (
        found[f"{name}_seconds_sum"][()]
        for name in (
            "time_to_first_token",
            "inter_token_latency",
            "e2e_request_latency",
            "request_time_per_output_token",
        )
    )
    assert (first_s >= 0.2, gaps_s >= 0.2) == (True, True)
    assert first_s + gaps_s == pytest.approx(whole_s)
    assert token_s == pytest.approx(gaps_s / 2), "two tokens after the first"
    assert found["inter_token_latency_seconds_count"] == {(): 2}
    assert found["time_to_first_token_seconds_bucket"][("0.1",)] == 0
    assert found["time_to_first_token_seconds_bucket"][("600.0",)] == 1


def test_the_target_s_own_times_are_those_of_its_last_event() -> None:
    last = event(ids("a"), LENGTH)
    last.stats.queued_s, last.stats.prefill_s = 1.5, 0.25
    client, *_ = served(last)
    assert ask(client).status_code == 200
    found = scrape(client)
    assert found["request_queue_time_seconds_sum"] == {(): 1.5}
    assert found["request_prefill_time_seconds_sum"] == {(): 0.25}


def test_the_server_s_own_probe_is_no_request() -> None:
    client, _, pipelines = tiers({}, event(ids("a"), LENGTH))
    assert client.get("/health").status_code == 200
    assert len(pipelines.requests) == 1
    assert "requests_total" not in scrape(client)


def test_services_in_one_process_count_for_themselves() -> None:
    (first, *_), (second, *_) = served(event(ids("a"), LENGTH)), served()
    assert ask(first).status_code == 200
    assert scrape(first)["requests_total"] == {("length",): 1}
    assert "requests_total" not in scrape(second)


@pytest.mark.parametrize("buckets", [LATENCIES, GAPS], ids=["latencies", "gaps"])
def test_buckets_are_fine_enough_for_percentiles(buckets: tuple[float, ...]) -> None:
    assert list(buckets) == sorted(set(buckets))
    assert max(b / a for a, b in pairwise(buckets)) <= 3


# -- the tiers ---------------------------------------------------------------------------------------------------------


class Tiers(Scripted):
    """Reports these statuses, and counts how often it is asked."""

    statuses: dict[str, list[pb.TierStatus]]
    asked = 0
    takes_s = 0.0

    async def status(self) -> dict[str, list[pb.TierStatus]]:
        self.asked += 1
        await asyncio.sleep(self.takes_s)
        return self.statuses

    async def check(self) -> None:
        """A replica can serve."""


def tiers(
    statuses: dict[str, list[pb.TierStatus]], *script: pb.DecodeEvent | Exception | float
) -> tuple[TestClient, Service, Tiers]:
    pipelines = Tiers(*script)
    pipelines.statuses = statuses
    service = Service(load_settings(), model(), pipelines)
    return TestClient(http_app(service)), service, pipelines


def replica(**target: Any) -> list[pb.TierStatus]:
    totals = pb.Totals(
        tallies=[
            pb.Tally(rounds=10, proposed=60, accepted=40, rejected=4),
            pb.Tally(rounds=20, proposed=50, accepted=30, rejected=8),
            pb.Tally(),
        ],
        direct=pb.Tally(rounds=2, proposed=10, accepted=5, rejected=1),
        plans={"plain": 3, "retrieval+model": 7},
        snapshots=5,
        preempted=1,
        rounds_by_tokens={1: 3, 5: 6, 100: 1},
        prefix_hit_tokens=900,
        prefix_miss_tokens=700,
    )
    status = pb.TierStatus(
        tier="target",
        ready=True,
        address="10.0.0.2:7000",
        live_sequences=5,
        waiting_sequences=2,
        kv_tokens=300,
        kv_pool_tokens=1000,
        kept_tokens=400,
        dropped_tokens=250,
        passes=12,
        pass_s=3.5,
        totals=totals,
    )
    for name, value in target.items():
        getattr(status, name).MergeFrom(value) if isinstance(value, pb.Audit) else setattr(status, name, value)
    draft = pb.TierStatus(tier="draft", ready=True, address="10.0.0.3:7000", passes=70, pass_s=0.5)
    return [draft, pb.TierStatus(tier="retrieval"), status]


def test_the_tiers_figures_are_what_they_report() -> None:
    client, *_ = tiers({"r1": replica()})
    found = scrape(client)
    assert found["num_requests_running"] == {("r1",): 3}
    assert found["num_requests_waiting"] == {("r1",): 2}
    assert found["kv_cache_used_tokens"] == {("r1",): 300}
    assert found["kv_cache_capacity_tokens"] == {("r1",): 1000}
    assert found["kv_cache_usage_ratio"] == {("r1",): 0.3}
    assert found["kv_cache_kept_tokens"] == {("r1",): 400}
    assert found["kv_cache_dropped_tokens_total"] == {("r1",): 250}
    assert found["prefix_tokens_total"] == {("r1", "hit"): 900, ("r1", "miss"): 700}
    assert found["num_preemptions_total"] == {("r1",): 1}
    assert found["snapshots_total"] == {("r1",): 5}
    assert found["rounds_total"] == {("r1", "plain"): 3, ("r1", "retrieval+model"): 7}
    assert found["spec_decode_num_draft_tokens_total"] == {("r1", "retrieval"): 50, ("r1", "draft"): 60}
    assert found["spec_decode_num_verified_tokens_total"] == {("r1", "retrieval"): 38, ("r1", "draft"): 44}
    assert found["spec_decode_num_accepted_tokens_total"] == {("r1", "retrieval"): 35, ("r1", "draft"): 35}
    assert found["tier_passes_total"] == {("r1", "draft"): 70, ("r1", "target"): 12}
    assert found["tier_pass_seconds_total"] == {("r1", "draft"): 0.5, ("r1", "target"): 3.5}
    assert "audit_mismatches_total" not in found, "nothing is audited"
    rounds = found["tokens_per_round_bucket"]
    assert (rounds[("r1", "1.0")], rounds[("r1", "4.0")], rounds[("r1", "5.0")]) == (3, 3, 9)
    assert (rounds[("r1", "64.0")], rounds[("r1", "+Inf")]) == (9, 10)
    assert found["tokens_per_round_sum"] == {("r1",): 3 + 30 + 100}
    assert found["tokens_per_round_count"] == {("r1",): 10}


def test_a_tier_that_does_not_answer_is_not_ready_and_left_out() -> None:
    client, *_ = tiers({"r1": replica(), "r2": [pb.TierStatus(tier="target")]})
    found = scrape(client)
    ready = {("r1", "draft"): 1, ("r1", "retrieval"): 0, ("r1", "target"): 1, ("r2", "target"): 0}
    assert found["tier_ready"] == ready
    others = {labels for name, series in found.items() if name != "tier_ready" for labels in series}
    assert not [labels for labels in others if "r2" in labels]


def test_a_pool_of_unknown_size_has_no_share() -> None:
    assert "kv_cache_usage_ratio" not in scrape(tiers({"r1": replica(kv_pool_tokens=0)})[0])


def test_where_no_tier_answers_the_gateway_s_figures_are_told() -> None:
    client, *_ = served()  # its `status` raises UnavailableError
    found = scrape(client)
    assert found["places"][()] > 0
    assert not [name for name in found if name.startswith(("tier", "spec_decode", "kv_cache", "num_"))]


def test_audits_are_told_where_there_are_any() -> None:
    client, *_ = tiers({"r1": replica(audit=pb.Audit(mismatches=3))})
    assert scrape(client)["audit_mismatches_total"] == {("r1",): 3}


def test_the_tiers_are_asked_once_a_second_however_many_scrape() -> None:
    async def rush() -> int:
        _, service, pipelines = tiers({"r1": replica()})
        pipelines.takes_s = 0.05
        texts = await asyncio.gather(*(service.scrape.text() for _ in range(20)))
        assert len(set(texts)) == 1
        assert pipelines.asked == 1
        service.scrape.asked_at -= FRESH_S
        await service.scrape.text()
        return pipelines.asked

    assert asyncio.run(rush()) == 2


def test_a_scrape_holds_up_no_stream() -> None:
    """The event loop, which all streams share, is busy for a few milliseconds; the tiers are waited for beside it."""

    async def longest_gap() -> float:
        _, service, pipelines = tiers({f"r{i}": replica() for i in range(8)})
        pipelines.takes_s = 0.5
        await service.scrape.text()  # loads what is loaded once
        service.scrape.asked_at = float("-inf")
        scraping = asyncio.create_task(service.scrape.text())
        gaps = []
        while not scraping.done():
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            gaps.append(time.perf_counter() - before)
        assert len(gaps) > 100
        return max(gaps)

    assert min(asyncio.run(longest_gap()) for _ in range(3)) < 0.05


# -- the dashboard and the documentation -------------------------------------------------------------------------------


def test_the_dashboard_and_the_pages_name_metrics_that_exist() -> None:
    known = set(re.findall(r"^\| `(triforce_\w+)`", metrics(), re.MULTILINE))
    panels = json.loads((REPOSITORY / "k8s/triforce/files/dashboard.json").read_text())["panels"]
    shown = " ".join(target["expr"] for panel in panels for target in panel["targets"])
    texts = {"dashboard.json": shown} | {
        page: (REPOSITORY / "docs" / page).read_text() for page in ("metrics.md", "operations.md")
    }
    for name, text in texts.items():
        named = {re.sub(r"_(bucket|sum|count)$", "", each) for each in re.findall(r"\btriforce_(?!core)\w+", text)}
        assert named <= known, (name, named - known)
    assert len({*re.findall(r"\btriforce_\w+", shown)}) >= 20
    assert [panel["gridPos"] for panel in panels if panel["gridPos"]["x"] + panel["gridPos"]["w"] > 24] == []
