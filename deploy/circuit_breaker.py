"""Which replicas the gateway does not send a request to while others can serve, by what they answered before."""

import time
from collections import OrderedDict
from typing import NamedTuple

from deploy.errors import OtherFingerprintError, ReplicaError

REST_S = 3.0  # after a failure, while other replicas can serve
MOST_FINGERPRINTS = 32  # clients may claim any; those refused longest ago are forgotten first


class Avoid(NamedTuple):
    """The names of replicas that a request should not go to."""

    unable: frozenset[str] = frozenset()  # to continue its output
    failed: frozenset[str] = frozenset()  # just now


NONE = Avoid()


class CircuitBreaker:
    """What replicas have refused, and which have failed just now."""

    def __init__(self) -> None:
        self.refused: OrderedDict[str, set[str]] = OrderedDict()  # by fingerprint, the replicas with another one
        self.failures: dict[str, float] = {}  # by replica, when it may be asked again

    def failed(self, error: Exception, fingerprint: str) -> None:
        """A request has failed. `fingerprint`: of the target whose output it was to continue; empty: of none."""
        if isinstance(error, OtherFingerprintError):
            self.refused.setdefault(fingerprint, set()).add(error.replica)
            self.refused.move_to_end(fingerprint)
            while len(self.refused) > MOST_FINGERPRINTS:
                self.refused.popitem(last=False)
        elif isinstance(error, ReplicaError):
            self.failures[error.replica] = time.monotonic() + REST_S

    def avoid(self, fingerprint: str) -> Avoid:
        now = time.monotonic()
        self.failures = {replica: until for replica, until in self.failures.items() if until > now}
        return Avoid(frozenset(self.refused.get(fingerprint, ())), frozenset(self.failures))
