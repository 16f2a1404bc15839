"""transformers' `generate` over random KV: what is timed is decoding after a context of the length that was asked."""

from __future__ import annotations

import pytest
import torch
from transformers import StaticCache

from tests.random_models import random_model
from triforce_tools.bench import generate


def test_a_filled_cache_is_what_the_new_tokens_see() -> None:
    """The cache stands for a context that was read. Only the last token of the context is forwarded, at its own
    position.
    """
    model, context = random_model(), 40
    cache = StaticCache(config=model.config, max_cache_len=64)
    torch.manual_seed(0)
    generate.fill(cache, model, context)
    generate.fill(cache, model, context)  # again, as for each run
    assert int(cache.get_seq_length()) == context
    keys = cache.layers[1].keys
    assert (keys[0, :, :context] != 0).any(-1).all()
    assert (keys[0, :, context:] == 0).all()
    ids = torch.zeros(1, context + 1, dtype=torch.long)
    with torch.inference_mode():
        model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=3, do_sample=False
        )
    assert int(cache.get_seq_length()) == context + 3, "the last drawn token is not forwarded"


def test_the_time_is_that_of_the_tokens_after_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the time of many tokens less the time of the first few, during which a step is compiled and captured."""
    model, now = random_model(), [0.0]
    whole, slow = model.generate, iter([0, 0, 9.0, 0, 0])  # one run of a few tokens is slow, by accident

    def timed(ids: torch.Tensor, *, max_new_tokens: int, past_key_values: StaticCache, **given: object) -> torch.Tensor:
        assert past_key_values.layers[0].max_cache_len == 256, "an odd number of keys would slow it"
        given |= {"past_key_values": past_key_values}
        now[0] += 5.0 + 0.25 * max_new_tokens + next(slow)
        return whole(ids, max_new_tokens=max_new_tokens, **given)

    monkeypatch.setattr(model, "generate", timed)
    monkeypatch.setattr(generate.time, "perf_counter", lambda: now[0])
    assert generate.generate_ms(model, 100, 12, repeats=2) == pytest.approx(250.0)
