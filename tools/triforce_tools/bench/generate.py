"""transformers' own `generate` with a static cache, which it compiles by itself on a GPU: what ours is compared with.

As in `DeviceWorkload.fill`, the KV of a long prompt is random, for the time of a step does not depend on its values.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor
from transformers import PreTrainedModel, StaticCache

from triforce_core.models.files import kv_shape
from triforce_tools.bench.peaks import synchronize

FEW = 8  # tokens: the first is drawn without the compiled step, the next ones compile, warm up and capture it


@torch.no_grad()
def generate_ms(model: PreTrainedModel, context: int, output: int, repeats: int = 3) -> float:
    """Milliseconds per token of greedy decoding after `context` tokens, from the difference between the times of a long
    run and a short run. The model must use an attention implementation of transformers itself. End tokens are ignored.
    """
    needed = context + FEW + output + 1
    # Its attention kernels are slower where the number of keys is odd.
    cache = StaticCache(config=model.config, max_cache_len=-(-needed // 256) * 256)
    model.generation_config.eos_token_id = None  # no token ends the text, and none is looked for

    def seconds(tokens: int) -> float:
        fill(cache, model, context)
        ids = torch.zeros(1, context + 1, dtype=torch.long, device=model.device)
        synchronize(model.device)
        begin = time.perf_counter()
        found = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
        synchronize(model.device)
        taken = time.perf_counter() - begin
        assert found.shape[1] == context + 1 + tokens, "nothing ends the text early"
        return taken

    seconds(FEW)
    times = [(seconds(FEW + output), seconds(FEW)) for _ in range(repeats)]
    # The two minimums are taken separately. The least difference would come from a pair whose short run was slow.
    return 1e3 * (min(many for many, _ in times) - min(few for _, few in times)) / output


def fill(cache: StaticCache, model: PreTrainedModel, tokens: int) -> None:
    """Let the cache hold KV of `tokens` tokens; all heads and layers get the same values."""
    layers, kv_heads, head_dim = kv_shape(model.config)
    values: Tensor = torch.randn(1, 1, tokens, head_dim, device=model.device).to(model.dtype)
    values = values.expand(1, kv_heads, -1, -1)
    cache.reset()
    for layer in range(layers):
        cache.update(values, values, layer)
