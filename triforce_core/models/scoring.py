"""The logprobs that requests ask for, from the logits of the target's passes: in the model's own distribution, before
any sampling parameter, as OpenAI has them.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from triforce_core.messages import Claim, SequenceSpec, TokenLogprobs, Verdict
from triforce_core.transfer import on_device

ROWS_TOGETHER = 64  # bounds the memory of the normalised copy


class Scorer:
    """Reports the logprobs of each prompt once, as its chunks are read, and those of verified tokens."""

    def __init__(self) -> None:
        self.reported: dict[int, int] = {}  # by sequence id, how many prompt tokens

    def num_positions(self, claim: Claim, spec: SequenceSpec) -> int:
        """Of how many last positions the pass must return logits to report the claim's prompt tokens."""
        reported = self.reported.get(claim.span.sequence_id, 0)
        if spec.prompt_logprobs is None or reported >= min(spec.prompt_length, claim.span.end):
            return 0
        return claim.span.end + len(claim.proposed) - max(0, reported - 1)  # logits belong to the token that follows

    def scored(self, verdict: Verdict, claim: Claim, spec: SequenceSpec, logits: Tensor) -> Verdict:
        """The verdict with the logprobs asked for. `logits` are the last ones of the claim's text."""
        prompt = self._of_prompt(claim, spec, logits) if self.num_positions(claim, spec) else ()
        output: tuple[TokenLogprobs, ...] = ()
        if spec.logprobs is not None and verdict.tokens:
            first = len(logits) - len(claim.proposed) - 1
            output = token_logprobs(logits[first : first + len(verdict.tokens)], verdict.tokens, spec.logprobs)
        return replace(verdict, logprobs=output, prompt_logprobs=prompt) if prompt or output else verdict

    def _of_prompt(self, claim: Claim, spec: SequenceSpec, logits: Tensor) -> tuple[TokenLogprobs, ...]:
        """The logprobs of the claim's prompt tokens that were not reported yet."""
        assert spec.prompt_logprobs is not None
        span = claim.span
        first, stop = self.reported.get(span.sequence_id, 0), min(spec.prompt_length, span.end)
        self.reported[span.sequence_id] = stop
        unpredicted = () if first else (TokenLogprobs(None),)  # the prompt's first token
        first = max(first, 1)
        tokens = span.tokens[first - span.start : stop - span.start]
        row = len(logits) - (span.end + len(claim.proposed)) + first - 1  # that of the token before
        return unpredicted + token_logprobs(logits[row : row + len(tokens)], tokens, spec.prompt_logprobs)

    def release(self, sequence_ids: list[int]) -> None:
        for sequence_id in sequence_ids:
            self.reported.pop(sequence_id, None)


@torch.inference_mode()
def token_logprobs(logits: Tensor, tokens: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    """Each token's logprob under its row of logits [tokens, vocab] float32, with the `num_top` most probable tokens."""
    found: list[TokenLogprobs] = []
    given = on_device(tokens, torch.int64, logits.device)
    for some, wanted in zip(logits.split(ROWS_TOGETHER), given.split(ROWS_TOGETHER), strict=True):
        normalised = some.log_softmax(-1)
        own = normalised.gather(-1, wanted[:, None])[:, 0].tolist()
        values, ids = (best.tolist() for best in normalised.topk(num_top, dim=-1))
        tops = (tuple(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True))
        found += [TokenLogprobs(logprob, top) for logprob, top in zip(own, tops, strict=True)]
    return tuple(found)
