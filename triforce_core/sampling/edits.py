"""Edits: what a request's parameters change in the logits before they are warped, given the text so far.

They depend on (logits, text, parameters) alone, so plain and speculative decoding apply the same edits to the same
token. The order: repetition penalty, frequency and presence penalty, bias, exclusions (grammar, `min_tokens`, bad
words).
"""

from collections import Counter, defaultdict

import torch
from torch import Tensor

from triforce_core.messages import SamplingParams, SequenceSpec
from triforce_core.sampling.grammars import GrammarState
from triforce_core.transfer import on_device


class TokenCounts:
    """How often each token occurs in a text that changes. An update costs what the change does."""

    def __init__(self, prompt_length: int, vocab_size: int, device: torch.device) -> None:
        self.prompt_length = prompt_length
        self.tokens: list[int] = []  # the counted text
        self.prompt = torch.zeros(vocab_size, device=device)  # occurrences, float32 [vocab]
        self.output = torch.zeros(vocab_size, device=device)

    def state(self, tokens: list[int], length: int, unchanged: int) -> None:
        """Count `tokens[:length]`; its first `unchanged` tokens are as they were."""
        first = min(unchanged, length, len(self.tokens))
        self._add(self.tokens[first:], first, -1)
        self.tokens[first:] = tokens[first:length]
        self._add(self.tokens[first:], first, 1)

    def _add(self, tokens: list[int], first: int, sign: int) -> None:
        inside = max(0, self.prompt_length - first)
        for counts, changed in ((self.prompt, tokens[:inside]), (self.output, tokens[inside:])):
            if changed:
                ids = on_device(changed, torch.int64, counts.device)
                counts.index_add_(0, ids, torch.full(ids.shape, float(sign), device=counts.device))


def penalised(logits: Tensor, in_prompt: Tensor, in_output: Tensor, sampling: SamplingParams) -> Tensor:
    """Logits after the penalties; the other tensors hold each token's occurrences and broadcast to them."""
    repeated = (in_prompt + in_output) > 0
    factor = sampling.repetition_penalty
    logits = torch.where(repeated, torch.where(logits > 0, logits / factor, logits * factor), logits)
    return logits - sampling.frequency_penalty * in_output - sampling.presence_penalty * (in_output > 0)


class Edits:
    """The edits of one sequence on one tier."""

    def __init__(
        self, spec: SequenceSpec, vocab_size: int, device: torch.device, grammar: GrammarState | None = None
    ) -> None:
        """`grammar`: None where the spec has none, or where this tier decodes without it."""
        self.spec, self.grammar = spec, grammar
        sampling = spec.sampling
        self.counts = TokenCounts(spec.prompt_length, vocab_size, device) if sampling.penalises else None
        ids, biases = zip(*sampling.logit_bias, strict=True) if sampling.logit_bias else ((), ())
        self.biased, self.biases = on_device(ids, torch.int64, device), on_device(biases, torch.float32, device)
        # The runs of tokens that must not occur, by the token before the run's last token. Runs of a single token are
        # under None.
        self.bad_words: dict[int | None, list[tuple[int, ...]]] = defaultdict(list)
        for word in sampling.bad_word_ids:
            self.bad_words[word[-2] if len(word) > 1 else None].append(word)

    def apply(self, logits: Tensor, first: int, tokens: list[int], unchanged: int) -> None:
        """Edit logits [rows, vocab] float32 in place. Row i is for the token at position first + i of the text
        `tokens`, whose first `unchanged` tokens are as they were in the last call.
        """
        sampling, device = self.spec.sampling, logits.device
        if self.counts is not None:
            self.counts.state(tokens, first, unchanged)
            self._penalise(logits, first, tokens, self.counts)
        if sampling.logit_bias:
            logits[:, self.biased] += self.biases
        if self.grammar is not None:
            output = self.spec.prompt_length
            allowed = self.grammar.masks(
                tokens[output:first],
                tokens[first : first + len(logits) - 1],
                max(0, unchanged - output),
                self.spec.stop_token_ids,
            )
            logits.masked_fill_(~allowed.to(device, non_blocking=True), -torch.inf)
        if excluded := self._excluded(first, len(logits), tokens):
            rows, ids = on_device(excluded, torch.int64, device).unbind(1)
            logits[rows, ids] = -torch.inf

    def _penalise(self, logits: Tensor, first: int, tokens: list[int], counts: TokenCounts) -> None:
        """Apply the penalties. `counts` covers the text before the first row. For each later row, the tokens between
        the first row and this row count as well.
        """
        more = [
            (row, token, count)
            for row in range(1, len(logits))
            for token, count in Counter(tokens[first : first + row]).items()
        ]
        rows, ids, between = on_device(more or [(0, 0, 0)], torch.int64, logits.device).unbind(1)
        corrected = penalised(logits[rows, ids], counts.prompt[ids], counts.output[ids] + between, self.spec.sampling)
        logits.copy_(penalised(logits, counts.prompt, counts.output, self.spec.sampling))
        if more:
            logits[rows, ids] = corrected

    def _excluded(self, first: int, num_rows: int, tokens: list[int]) -> list[tuple[int, int]]:
        """(row, token id) of each token that `min_tokens` or bad words exclude."""
        earliest_stop = self.spec.prompt_length + self.spec.sampling.min_tokens
        found = []
        for row, position in enumerate(range(first, first + num_rows)):
            if position < earliest_stop:
                found += [(row, token) for token in self.spec.stop_token_ids]
            for word in self.bad_words.get(None, ()):
                found.append((row, word[-1]))
            for word in self.bad_words.get(tokens[position - 1], ()):
                begin = position + 1 - len(word)
                if begin >= 0 and tuple(tokens[begin:position]) == word[:-1]:
                    found.append((row, word[-1]))
        return found
