"""A planted model copies before it is trained: that is what planting is for."""

from __future__ import annotations

import pytest
import torch
from triforce_tools.demo_training.modeling import build_model, logits

from triforce_tools.demo_training.settings import MODELS, ModelName, load_settings

SETTINGS = load_settings()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("gap", [0, 4000])  # positions skipped between the two halves
def test_what_stood_before_is_continued_alike(name: ModelName, gap: int) -> None:
    model = build_model(SETTINGS.geometry(name), max_positions=SETTINGS.max_positions, seed=SETTINGS.seed)
    half = torch.randint(1, 4096, (256,), generator=torch.Generator().manual_seed(0))
    ids, positions = torch.cat([half, half])[None], torch.arange(512)[None]
    positions = positions + gap * (positions >= 256)
    with torch.inference_mode():
        right = logits(model, ids, positions)[0, :-1].argmax(-1) == ids[0, 1:]
    assert float(right[:255].float().mean()) < 0.02  # random text: nothing to go by
    assert float(right[260:].float().mean()) > 0.75
