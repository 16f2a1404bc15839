"""Drawing a model's own tokens from the logits of a pass."""

from math import inf

import torch
from torch import Tensor

from triforce_core.kv.base import Row
from triforce_core.models.runner import ModelRunner
from triforce_core.sampling.draw import Draw, drawn, perturbed_logits
from triforce_core.sampling.edits import Edits
from triforce_core.sampling.grammars import Grammars

NO_TOKEN = -1  # in place of a token where the parameters exclude all
# A token, and how much less its perturbed logit is than the greatest.
Ranked = list[tuple[int, float]]
LogitsOf = dict[int, Tensor]  # by sequence id: logits of its text's last positions, [positions, vocab] float32


class Drawer:
    """Draws for one tier. Keeps, for each sequence whose parameters edit logits, what the edits depend on."""

    def __init__(self, runner: ModelRunner, grammars: Grammars | None = None, *, wait_for_grammars: bool) -> None:
        """`grammars`: None: this tier decodes without. `wait_for_grammars`: else without one that is not compiled."""
        self.runner, self.grammars, self.wait_for_grammars = runner, grammars, wait_for_grammars
        self.edits: dict[int, Edits] = {}  # by sequence id

    @torch.inference_mode()
    def draw(self, logits: LogitsOf) -> dict[int, list[int]]:
        """The model's own tokens; `NO_TOKEN` where the parameters exclude all. The host waits for the device once."""
        if not logits:
            return {}
        edited = self._edited(logits)
        tokens = drawn(edited, self._draws(logits), self.runner.noisiest)
        if any(sequence_id in self.edits for sequence_id in logits):
            tokens = tokens.masked_fill_(edited.isneginf().all(-1), NO_TOKEN)
        of_all, by_id, taken = tokens.tolist(), dict[int, list[int]](), 0
        for sequence_id, own in logits.items():
            by_id[sequence_id] = of_all[taken : taken + len(own)]
            taken += len(own)
        return by_id

    @torch.inference_mode()
    def perturbed(self, logits: LogitsOf) -> Tensor:
        """The perturbed logits, [Σ positions, vocab] float64; the greatest of each row is what `draw` takes."""
        return perturbed_logits(self._edited(logits), self._draws(logits))

    @torch.inference_mode()
    def ranked(self, logits: LogitsOf, most: int) -> dict[int, list[Ranked]]:
        """The tokens that `draw` would take first, second, … at each position: at most so many, the excluded left out,
        equal ones in any order. The host waits for the device once.
        """
        if not logits:
            return {}
        perturbed = self.perturbed(logits)
        best = perturbed.topk(min(most, perturbed.shape[1]))
        values, tokens = torch.stack([best.values, best.indices.double()]).tolist()
        by_id, taken = dict[int, list[Ranked]](), 0
        for sequence_id, own in logits.items():
            unit = self.runner.kv.held[sequence_id].spec.sampling.temperature or 1.0
            rows = zip(tokens[taken : taken + len(own)], values[taken : taken + len(own)], strict=True)
            by_id[sequence_id] = [ranking(ids, of_all, unit) for ids, of_all in rows]
            taken += len(own)
        return by_id

    def _draws(self, logits: LogitsOf) -> list[Draw]:
        draws = []
        for sequence_id, own in logits.items():
            held = self.runner.kv.held[sequence_id]
            end, of_text = len(held.tokens), max(0, len(own) - len(held.tree.tokens))
            places = [*range(end + 1 - of_text, end + 1), *(end + 1 + depth for depth in held.tree.depths)]
            draws += [Draw(held.spec.sampling, held.spec.seed, place) for place in places[-len(own) :]]
        return draws

    def _edited(self, logits: LogitsOf) -> Tensor:
        """All logits, [Σ positions, vocab], after the edits of their sequences. The given tensors do not change."""
        edits = {sequence_id: self._edits_of(sequence_id) for sequence_id in logits}
        if len(logits) == 1 and not any(edits.values()):
            return next(iter(logits.values()))
        edited, taken = torch.cat(list(logits.values())), 0
        for sequence_id, own in logits.items():
            rows = edited[taken : taken + len(own)]
            taken += len(own)
            if own_edits := edits[sequence_id]:
                held = self.runner.kv.held[sequence_id]
                text, tree, end = held.tokens, held.tree, len(held.tokens)
                of_tree = min(len(own), len(tree.tokens))
                if of_text := len(own) - of_tree:
                    own_edits.apply(rows[:of_text], end + 1 - of_text, text, held.unchanged)
                    held.unchanged = end
                for index in range(len(tree.tokens) - of_tree, len(tree.tokens)):
                    text += tree.path(index)
                    row = len(own) - len(tree.tokens) + index
                    own_edits.apply(rows[row : row + 1], len(text), text, held.unchanged)
                    held.unchanged = end  # another path may follow
                    del text[end:]
        return edited

    def _edits_of(self, sequence_id: int) -> Edits | None:
        spec = self.runner.kv.held[sequence_id].spec
        if not spec.edits_logits:
            return None
        if sequence_id not in self.edits:
            vocab_size, device = self.runner.model.config.vocab_size, self.runner.kv.geometry.device
            self.edits[sequence_id] = Edits(spec, vocab_size, device)
        edits = self.edits[sequence_id]
        if spec.grammar and edits.grammar is None and self.grammars is not None:
            edits.grammar = self.grammars.state(spec.grammar, wait=self.wait_for_grammars)
        return edits

    def release(self, sequence_ids: list[int]) -> None:
        for sequence_id in sequence_ids:
            self.edits.pop(sequence_id, None)


def ranking(tokens: list[float], perturbed: list[float], temperature: float) -> Ranked:
    """Of tokens by falling perturbed logits, those that are not excluded.

    Gaps are in logits of temperature 1: dividing them by the temperature does not change whose noise differs by more.
    """
    pairs = zip(tokens, perturbed, strict=True)
    return [(int(token), temperature * (perturbed[0] - value)) for token, value in pairs if value > -inf]


def by_sequence(logits: Tensor, rows: list[Row]) -> LogitsOf:
    """The logits of a pass, [Σ num_sampled, vocab] in the order of its rows, by sequence id."""
    sampled = [row for row in rows if row.num_sampled]
    parts = logits.split([row.num_sampled for row in sampled])
    return {row.sequence_id: part for row, part in zip(sampled, parts, strict=True)}
