"""How many drafted tokens were accepted lately, by where they came from: of one request, or of many."""

from dataclasses import dataclass, field
from math import ceil

from triforce_core.messages import SCORED, Tally
from triforce_core.plans import Acceptance, Plan

# Before anything is learned.
UNKNOWN = Acceptance(
    retrieval=0.9,
    accepted=1.0,
    accepted_below=1.0,
    steps=2.0,
    steps_below=2.0,
    lookup_first=0.6,
    lookup=0.6,
    lookup_long=0.9,
    found=0.3,
)
# Factor by which each token of a request reduces the weight of what its earlier tokens have shown.
REQUEST_FADING = 0.98
# Tokens, drafts or guesses: the weight of what was known before, beside what is learned. For a request that is what
# other requests have shown, for the server `UNKNOWN`.
TRUST = 3.0


@dataclass(slots=True)
class Chance:
    """How often something happened lately: a chance, or a mean if it can happen more than once at a time."""

    happened: float = 0.0
    times: float = 0.0

    def add(self, yes: float, no: float) -> None:
        """Add that it happened `yes` times in `yes` + `no` cases."""
        self.happened += yes
        self.times += yes + no

    def fade(self, kept: float) -> None:
        """Multiply the weight of everything so far by `kept`."""
        self.happened *= kept
        self.times *= kept

    def given(self, before: float, trust: float) -> float:
        """The estimated chance, given the prior estimate `before`, which has the weight of `trust` times."""
        return (self.happened + trust * before) / (self.times + trust)


@dataclass(slots=True)
class Acceptances:
    """The chances of `Acceptance`, as the tallies of rounds show them."""

    chances: dict[str, Chance] = field(default_factory=lambda: {name: Chance() for name in Acceptance._fields})

    def add(self, plan: Plan, tallies: tuple[Tally, ...]) -> None:
        """Add what became of the tokens of one round. `tallies`: of the target and the levels below it."""
        target, below, leaf = (*tallies, Tally(), Tally(), Tally())[:3]
        if plan.retrieval:
            self.chances["retrieval"].add(target.accepted, target.rejected)
            self._add_model("accepted_below", "steps_below", below, leaf)
        else:
            self._add_model("accepted", "steps", target, leaf)
            self._add_draft(target)
        self._add_guesses(leaf)

    def _add_draft(self, target: Tally) -> None:
        """Add what became of a draft that the target verified, if prompt lookup made it. Where lookup finds something,
        either its first token is wrong, or most of what follows is right; so the first token has a chance of its own.
        Guesses are scored at the same time, but at most one in `SCORED` tokens.
        """
        accepted, rejected = target.lookup_accepted, target.lookup_rejected
        if accepted or rejected:
            self.chances["lookup_first"].add(accepted > 0, accepted == 0)
        if accepted:
            self.chances["lookup"].add(min(accepted, SCORED) - 1, rejected if accepted < SCORED else 0)
        # Guesses that are scored end after `SCORED` tokens, so only drafts show whether later ones are right.
        if accepted >= SCORED:
            self.chances["lookup_long"].add(accepted - SCORED, rejected)

    def _add_guesses(self, tally: Tally) -> None:
        """Add the guesses of prompt lookup that were scored, whoever drafted."""
        if not tally.rounds:
            return
        # A stop token ends a guess early. If such a short guess is right, the text ends there and the guess is never
        # scored. So every short guess that is scored is wrong.
        found = min(tally.rounds, max(tally.rejected, ceil(tally.proposed / SCORED)))
        right = found - tally.rejected  # guesses of which all tokens were right
        others = max(0, tally.accepted - SCORED * right)  # right tokens of guesses that ended with a wrong one
        # Such a guess has 1 to 3 right tokens if its first one is, on average about 2.
        begun = right + min(tally.rejected, max(ceil(others / (SCORED - 1)), others / 2))
        self.chances["found"].add(found, tally.rounds - found)
        self.chances["lookup_first"].add(begun, found - begun)
        self.chances["lookup"].add(max(0, tally.accepted - begun), tally.rejected - (found - begun))

    def _add_model(self, accepted: str, steps: str, verified: Tally, leaf: Tally) -> None:
        """Add what became of the drafts of the model that were verified."""
        if verified.drafts:
            right = verified.accepted - verified.lookup_accepted
            self.chances[accepted].add(right, verified.drafts - right)
            self.chances[steps].add(leaf.passes, verified.drafts - leaf.passes)

    def fade(self, kept: float) -> None:
        """Multiply the weight of everything learned by `kept`."""
        for chance in self.chances.values():
            chance.fade(kept)

    def given(self, before: Acceptance | None = None) -> Acceptance:
        """The estimated chances, given the prior estimates `before` of the weight `TRUST`. None: nothing else is known;
        `lookup_long`, which only long drafts show, is then at least `lookup`: too high an estimate leads to long
        drafts, which correct it.
        """
        if before is None:
            lookup = self.chances["lookup"].given(UNKNOWN.lookup, TRUST)
            before = UNKNOWN._replace(lookup_long=max(UNKNOWN.lookup_long, lookup))
        return Acceptance(*(self.chances[name].given(getattr(before, name), TRUST) for name in Acceptance._fields))


@dataclass(slots=True)
class Drafted:
    """What the controller knows of one request."""

    acceptances: Acceptances = field(default_factory=Acceptances)
    faded_at: int = 0  # length of the text when `acceptances` faded last
    kind: str = ""  # of the plan of the latest round; empty before the first
    begun_s: float = 0.0  # seconds of first snapshots, of whichever request, since its latest round with drafts
    unpaid_s: float = 0.0  # of these, and of tiers that had to catch up: what is not yet subtracted from `saved`
    saved: float = 0.0  # what speculation has saved, in tokens of plain decoding; below 0 if it has cost more

    def fade(self, length: int) -> None:
        """Forget a little of `acceptances` per token since the last call; call it before their use. `length`: now."""
        self.acceptances.fade(REQUEST_FADING ** (length - self.faded_at))
        self.faded_at = length
