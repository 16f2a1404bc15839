"""Judging by equality, and where a block ends."""

from __future__ import annotations

import pytest

from triforce_core.messages import GREEDY, Claim, SequenceSpec, Span, Verdict
from triforce_core.roles import judge

STOP = 9


@pytest.mark.parametrize(
    ("own", "proposed", "max_length", "expected"),
    [
        ([1], (), 100, Verdict((1,), 0)),
        ([1, 2, 3], (1, 2), 100, Verdict((1, 2, 3), 2)),
        ([1, 5, 6], (1, 2), 100, Verdict((1, 5), 1)),
        ([5, 6, 7], (1, 2), 100, Verdict((5,), 0)),
        ([5, 2, 3], (1, 2), 100, Verdict((5,), 0)),
        ([1, STOP, 3], (1, STOP), 100, Verdict((1, STOP), 2, ended=True)),
        ([1, STOP, 3], (1, 2), 100, Verdict((1, STOP), 1, ended=True)),
        ([1, 2, STOP], (1, 2), 100, Verdict((1, 2, STOP), 2, ended=True)),
        ([STOP], (), 100, Verdict((STOP,), 0, ended=True)),
        ([1, 2, 3], (1, 2), 12, Verdict((1, 2), 2, ended=True)),
        ([1, 2, 3], (1, 7), 12, Verdict((1, 2), 1, ended=True)),
        ([1, 2, 3], (1, 2), 13, Verdict((1, 2, 3), 2, ended=True)),
        ([4], (), 11, Verdict((4,), 0, ended=True)),
    ],
)
def test_what_is_kept_of_a_proposal(
    own: list[int], proposed: tuple[int, ...], max_length: int, expected: Verdict
) -> None:
    """The claim's span ends at position 10; the verifier's own tokens are those after each prefix of the proposal."""
    spec = SequenceSpec(GREEDY, seed=0, prompt_length=10, max_length=max_length, stop_token_ids=(STOP,))
    claim = Claim(Span(1, 0, tuple(range(20, 30)), spec), proposed)
    assert judge(own, claim, spec) == expected
