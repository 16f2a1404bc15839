"""The figures of a request that was decoded in several attempts, as one."""

from __future__ import annotations

from itertools import zip_longest

from triforce_core._gen.triforce.v1 import tiers_pb2 as pb

# Figures taken from the latest attempt, and from the first attempt that has them. All others are added up.
LATEST = ("plan", "expected_ms", "plain_ms")
FIRST = ("prompt_tokens", "cached_tokens")


def summed(before: pb.DecodeStats, latest: pb.DecodeStats) -> pb.DecodeStats:
    """The stats of the attempts `before` and of the `latest` one together."""
    total = pb.DecodeStats()
    total.CopyFrom(before)
    for field, value in latest.ListFields():
        if field.name == "tallies":
            del total.tallies[:]
            pairs = zip_longest(before.tallies, latest.tallies, fillvalue=pb.Tally())
            total.tallies.extend(added(*pair) for pair in pairs)
        elif field.name == "direct":
            total.direct.CopyFrom(added(before.direct, latest.direct))
        elif field.name == "plans":
            for kind, rounds in latest.plans.items():
                total.plans[kind] += rounds
        elif field.name in LATEST:
            setattr(total, field.name, value)
        elif field.name not in FIRST:
            setattr(total, field.name, getattr(before, field.name) + value)
        elif not before.prompt_tokens:  # the first attempt that has got so far
            setattr(total, field.name, value)
    return total


def added(one: pb.Tally, other: pb.Tally) -> pb.Tally:
    total = pb.Tally()
    for field in pb.Tally.DESCRIPTOR.fields:
        setattr(total, field.name, getattr(one, field.name) + getattr(other, field.name))
    return total
