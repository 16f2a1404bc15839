"""Offload on a GPU, where copies run beside the computation: what must be the same as without, and what is pinned."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.random_models import random_model, random_tokens
from tests.stating import Statement, ask, full_kv
from triforce_core.attention import KERNELS, default_kernel
from triforce_core.kv.full import FullKV
from triforce_core.kv.offloaded import Offload, OffloadedKV
from triforce_core.kv.selectors import LANDMARKS, MeanKey
from triforce_core.kv.snapshot import ChunkSettings
from triforce_core.models.load import ATTENTION, kv_geometry
from triforce_core.models.runner import ModelRunner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LAYERS, POOL, LENGTH = 6, 12_000, 5000
CHUNKS = ChunkSettings(256, 8, 64)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    model = random_model(num_hidden_layers=LAYERS, hidden_size=256, num_attention_heads=8, head_dim=64)
    model.set_attn_implementation(ATTENTION)
    return model.to("cuda")


def runners(model: PreTrainedModel, offload: Offload) -> tuple[ModelRunner, ModelRunner]:
    """Two runners: one has its KV in memory, the other is offloaded."""
    geometry, kernel = kv_geometry(model), KERNELS[default_kernel("cuda", "float32")]
    memory, offloaded = FullKV(geometry, POOL, kernel), OffloadedKV(geometry, POOL, kernel, offload)
    return ModelRunner(model, memory), ModelRunner(model, offloaded)


@pytest.mark.parametrize(("resident", "where"), [(0, "host"), (1, "host"), (LAYERS - 1, "host"), (1, "disk")])
def test_logits_and_snapshots_are_those_of_memory(
    model: PreTrainedModel, where: str, resident: int, tmp_path: Path
) -> None:
    """Two long sequences through prompt chunks and many short passes one after the other, so that copies of one pass
    meet those of the next. The same kernels run on the same numbers: only a lost race would show, and by far more
    than rounding.
    """
    rng = random.Random(resident)
    both = runners(model, Offload(resident, tmp_path if where == "disk" else None))
    texts = {n: random_tokens(LENGTH, seed=n) for n in (1, 2)}
    ends = [*range(1000, LENGTH - 200, 1000), *range(LENGTH - 200, LENGTH, 9)]
    base = 0
    for end in ends:
        some = [1, 2] if end < LENGTH - 200 else rng.choice([[1], [2], [1, 2]])
        statements = [Statement(n, texts[n][:end], 4) for n in some]
        expected, found = (ask(runner, *statements, max_length=LENGTH) for runner in both)
        for n in some:
            assert isinstance(found[n], Tensor)
            assert found[n].isfinite().all()
            torch.testing.assert_close(found[n], expected[n], atol=1e-4, rtol=0)
        cuts = [full_kv(runner).cut(some[0], end, CHUNKS, MeanKey(), base) for runner in both]
        for one, other in zip(cuts[1].tensors, cuts[0].tensors, strict=True):
            assert one.device == other.device == model.device
            torch.testing.assert_close(one, other, atol=1e-4, rtol=0)
        base = cuts[0].version


def test_the_host_s_part_is_pinned_and_the_device_holds_no_more_than_planned(model: PreTrainedModel) -> None:
    geometry, offload = kv_geometry(model), Offload(1)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    kv = OffloadedKV(geometry, POOL, KERNELS[default_kernel("cuda", "float32")], offload)
    on_device, on_host = offload.kv_bytes(geometry, POOL)
    assert on_device <= torch.cuda.memory_allocated() - before < on_device + 2**21  # the allocator rounds up
    assert kv.host.nbytes == on_host
    assert kv.host.is_pinned()


def test_landmarks_on_the_host_are_pinned(model: PreTrainedModel) -> None:
    kernel, landmark = KERNELS[default_kernel("cuda", "float32")], LANDMARKS["mean_key"]
    kv = OffloadedKV(kv_geometry(model), POOL, kernel, Offload(1), unit=CHUNKS.chunk, landmark=landmark)
    assert kv.landmarks is not None
    assert [layer.device.type for layer in kv.landmarks.layers] == ["cuda"] + ["cpu"] * (LAYERS - 1)
    assert all(layer.is_pinned() for layer in kv.landmarks.layers[1:])
