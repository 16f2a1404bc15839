"""Verifiers that run real passes but draw at random which tokens are accepted. They show the speed at given acceptance
rates with untrained weights. All figures made with them are labelled as synthetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from triforce_core.errors import InvalidValueError, require
from triforce_core.kv.full import FullKV
from triforce_core.messages import Claim, Tier, Verdict
from triforce_core.models.files import kv_shape
from triforce_core.speculation.verification import ModelVerifier, judge
from triforce_tools.bench.fill import fill


@dataclass(frozen=True, slots=True)
class SyntheticAcceptance:
    """Chance that a proposed token is accepted when all earlier tokens of its block were."""

    retrieval: float  # a token of the retrieval tier, by the target
    draft: float  # a token of the draft tier, by the retrieval tier

    @classmethod
    def parse(cls, text: str) -> SyntheticAcceptance:
        """The rates in a text such as `.92,.6`, retrieval first. Raises `InvalidValueError`."""
        try:
            rates = cls(*map(float, text.split(",")))
        except (TypeError, ValueError):
            rule = "must be two numbers: acceptance of retrieval, of draft"
            raise InvalidValueError("acceptance", text, rule) from None
        chances = (rates.retrieval, rates.draft)
        require(all(0 <= each <= 1 for each in chances), "acceptance", text, "must each be between 0 and 1")
        return rates

    def by(self, tier: Tier) -> float:
        """The rate at which `tier` accepts tokens that are proposed to it."""
        return self.retrieval if tier == Tier.TARGET else self.draft

    def tokens_per_round(self, lookaheads: tuple[int, int]) -> float:
        """The expected number of tokens that a round of the target gives. The self-drafter's block grows by one token
        and the accepted drafts before it, until it has as many as were asked for.
        """
        block, drafted = lookaheads
        steps = {1 + n: self.draft**n * (1 - self.draft) for n in range(drafted)} | {1 + drafted: self.draft**drafted}
        lengths, chances = {0: 1.0}, dict[int, float]()
        while lengths:
            grown: dict[int, float] = {}
            for length, chance in lengths.items():
                for more, step in steps.items():
                    into = grown if length + more < block else chances
                    into[length + more] = into.get(length + more, 0.0) + chance * step
            lengths = grown
        return sum(chance * self.retrieval**n for length, chance in chances.items() for n in range(length + 1))


def chance(seed: int, position: int, what: str) -> float:
    """A number uniform in [0, 1) that depends on the arguments only, so it is the same in every process."""
    return int.from_bytes(blake2b(f"{seed}/{position}/{what}".encode(), digest_size=6).digest()) / 2**48


class SyntheticVerifier(ModelVerifier):
    """Runs the model as `ModelVerifier` does, but then accepts each proposed token with the given chance, which depends
    on the seeds (its own and the request's), tier and position only. With `fill`, all prefill chunks but the last are
    not run: their KV is random.
    """

    def __init__(self, real: ModelVerifier, *, acceptance: SyntheticAcceptance, seed: int, fill: bool) -> None:
        """`real`: the verifier in whose place this one is put."""
        super().__init__(real.runner, real.tier, real.drawer.grammars)
        self.rate, self.seed, self.fill = acceptance.by(real.tier), seed, fill

    def verify(self, claims: list[Claim]) -> list[Verdict]:
        if self.fill and isinstance(self.runner.kv, FullKV):
            for claim in claims:
                if not claim.sample:
                    config = self.runner.model.config
                    fill(self.runner.kv, claim.span, config.num_attention_heads // kv_shape(config)[1])
        verdicts = super().verify(claims)
        return [
            self._draw(claim, verdict) if claim.proposed and verdict.tokens else verdict
            for claim, verdict in zip(claims, verdicts, strict=True)
        ]

    def _draw(self, claim: Claim, verdict: Verdict) -> Verdict:
        """The verdict of a verifier whose own token equals the proposed one at the given rate."""
        end, vocab_size = claim.span.end, self.runner.model.config.vocab_size
        spec = self.runner.kv.held[claim.span.sequence_id].spec
        seed = self.seed + spec.seed  # requests that are decoded together must not all be accepted alike
        own = [
            token if chance(seed, end + index, self.tier.name) < self.rate else (token + 1) % vocab_size
            for index, token in enumerate(claim.proposed)
        ]
        return judge([*own, verdict.tokens[-1]], claim, spec)
