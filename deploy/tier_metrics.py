"""The metrics of the tiers, from what the tiers report of themselves at a scrape."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from actors.wire import tallies_from_proto
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.messages import Tally

Statuses = Mapping[str, list[pb.TierStatus]]  # by replica, of each of its tiers
Values = dict[tuple[str, ...], float]  # by the values of a metric's own labels

TOKENS_PER_ROUND = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)


class Figure(NamedTuple):
    """A metric of tiers. `of` gives its values for a tier that answered; empty if the tier does not have it."""

    name: str
    about: str
    of: Callable[[pb.TierStatus], Values]
    labels: tuple[str, ...] = ()  # besides the model and the replica


def of_target(figure: Callable[[pb.TierStatus], float]) -> Callable[[pb.TierStatus], Values]:
    return lambda status: {(): figure(status)} if status.tier == "target" else {}


def of_model(figure: Callable[[pb.TierStatus], float]) -> Callable[[pb.TierStatus], Values]:
    return lambda status: {(status.tier,): figure(status)} if status.passes else {}


def of_drafting(figure: Callable[[Tally], float]) -> Callable[[pb.TierStatus], Values]:
    """The figure by the tier that drafted, from the tallies of the tier that verified: for tokens of the draft tier
    that is the retrieval tier, or the target in rounds without the retrieval tier.
    """

    def values(status: pb.TierStatus) -> Values:
        if not status.HasField("totals"):
            return {}
        target, retrieval, *_ = tallies_from_proto(status.totals.tallies)
        [direct] = tallies_from_proto([status.totals.direct])
        return {("retrieval",): figure(target - direct), ("draft",): figure(retrieval + direct)}

    return values


def plans(status: pb.TierStatus) -> Values:
    return {(plan,): rounds for plan, rounds in status.totals.plans.items()}


def prefixes(status: pb.TierStatus) -> Values:
    if status.tier != "target":
        return {}
    return {("hit",): status.totals.prefix_hit_tokens, ("miss",): status.totals.prefix_miss_tokens}


def kv_usage(status: pb.TierStatus) -> Values:
    return {(): status.kv_tokens / status.kv_pool_tokens} if status.kv_pool_tokens else {}


def mismatches(status: pb.TierStatus) -> Values:
    return {(): status.audit.mismatches} if status.HasField("audit") else {}


GAUGES = (
    Figure(
        "num_requests_running",
        "Requests that the replica prefills or decodes.",
        of_target(lambda status: max(0, status.live_sequences - status.waiting_sequences)),
    ),
    Figure(
        "num_requests_waiting",
        "Requests that wait in the replica for room.",
        of_target(lambda status: status.waiting_sequences),
    ),
    Figure(
        "kv_cache_used_tokens",
        "Tokens of the target's KV pool that requests use, alone or together with others.",
        of_target(lambda status: status.kv_tokens),
    ),
    Figure(
        "kv_cache_capacity_tokens",
        "Tokens for which the target's KV pool has room.",
        of_target(lambda status: status.kv_pool_tokens),
    ),
    Figure(
        "kv_cache_usage_ratio",
        "The part of the target's KV pool that requests use, from 0 to 1.",
        kv_usage,
    ),
    Figure(
        "kv_cache_kept_tokens",
        "Tokens of the target's KV pool that no request uses: kept for requests with the same prefix while there is"
        " room.",
        of_target(lambda status: status.kept_tokens),
    ),
)
COUNTERS = (
    Figure(
        "kv_cache_dropped_tokens",
        "Tokens that were kept and have been dropped for requests that needed the room, those used longest ago first.",
        of_target(lambda status: status.dropped_tokens),
    ),
    Figure(
        "prefix_tokens",
        "Prompt tokens by outcome: `hit` if their KV was found, `miss` if they were read.",
        prefixes,
        ("outcome",),
    ),
    Figure(
        "num_preemptions",
        "Times that a request's KV was dropped because the pool was full, and its tokens prefilled again.",
        of_target(lambda status: status.totals.preempted),
    ),
    Figure(
        "snapshots",
        "Snapshots of sparse KV cut for the retrieval tier: first ones and refreshes.",
        of_target(lambda status: status.totals.snapshots),
    ),
    Figure("rounds", "Rounds of the target by kind of plan: `plain`, or who drafted.", plans, ("plan",)),
    Figure(
        "spec_decode_num_draft_tokens",
        "Tokens that the tier, or prompt lookup in its place, proposed to the tier above.",
        of_drafting(lambda tally: tally.proposed),
        ("tier",),
    ),
    Figure(
        "spec_decode_num_verified_tokens",
        "Of the proposed tokens those that were accepted or rejected: one of each position, up to the first rejected.",
        of_drafting(lambda tally: tally.accepted + tally.rejected),
        ("tier",),
    ),
    Figure(
        "spec_decode_num_accepted_tokens",
        "Of the proposed tokens those that the tier above accepted.",
        of_drafting(lambda tally: tally.accepted),
        ("tier",),
    ),
    Figure(
        "tier_passes",
        "Passes of the tier's model, those over prompts included.",
        of_model(lambda status: status.passes),
        ("tier",),
    ),
    Figure(
        "tier_pass_seconds",
        "Seconds that passes of the tier's model took; the rate is the share of time in which the tier computes.",
        of_model(lambda status: status.pass_s),
        ("tier",),
    ),
    Figure(
        "tier_refused_calls",
        "Calls to the tier's process that lacked its secret.",
        lambda status: {(status.tier,): status.refused_calls},
        ("tier",),
    ),
    Figure(
        "target_restarts",
        "Times that the target's process died or hung and was replaced.",
        of_target(lambda status: status.restarts),
    ),
    Figure(
        "audit_mismatches",
        "Tokens that audits found computed wrongly, with `target.audit` above 0: must stay 0.",
        mismatches,
    ),
)


class TierFamilies:
    """What a scrape tells of the tiers. A tier that does not answer has `triforce_tier_ready` alone, which is 0."""

    def __init__(self, model: str, statuses: Statuses) -> None:
        self.model = model
        self.found = [(replica, tier) for replica, tiers in statuses.items() for tier in tiers]
        # `Pipeline.status` reports a tier that did not answer without an address.
        self.answered = [(replica, tier) for replica, tier in self.found if tier.address]

    def collect(self) -> Iterator[Metric]:
        about = (
            "1 if the tier's process answers and works, 0 if not. Of passes that hang, only the target's are noticed."
        )
        ready = GaugeMetricFamily("triforce_tier_ready", about, labels=["model_name", "replica", "tier"])
        for replica, status in self.found:
            ready.add_metric([self.model, replica, status.tier], status.ready)
        yield ready
        for figure in (*GAUGES, *COUNTERS):
            kind = GaugeMetricFamily if figure in GAUGES else CounterMetricFamily
            labels = ["model_name", "replica", *figure.labels]
            family = kind(f"triforce_{figure.name}", figure.about, labels=labels)
            for replica, status in self.answered:
                for at, value in figure.of(status).items():
                    family.add_metric([self.model, replica, *at], value)
            yield family
        yield self.tokens_per_round()

    def tokens_per_round(self) -> Metric:
        about = "Tokens that a round of the target committed; plain decoding commits 1."
        family = HistogramMetricFamily("triforce_tokens_per_round", about, labels=["model_name", "replica"])
        for replica, status in self.answered:
            if not status.HasField("totals"):
                continue
            rounds = status.totals.rounds_by_tokens.items()
            up_to = {str(float(le)): sum(n for tokens, n in rounds if tokens <= le) for le in TOKENS_PER_ROUND}
            buckets = [*up_to.items(), ("+Inf", sum(n for _, n in rounds))]
            family.add_metric([self.model, replica], buckets, sum(tokens * n for tokens, n in rounds))
        return family
