"""Which shapes of passes there are, and which of them a batch takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.random_models import FAMILIES, random_model, random_tokens
from tests.stating import spec
from triforce_core.attention import KERNELS, Ranged
from triforce_core.attention.flash_decoding import triton_ranged
from triforce_core.attention.ranged import gathered
from triforce_core.config import load_settings
from triforce_core.errors import InvalidValueError
from triforce_core.kv.base import Forward, Held, KVCache, KVGeometry, Lack
from triforce_core.kv.full import FullKV
from triforce_core.kv.heavy_hitter import HeavyHitterKV, HeavyHitterSettings
from triforce_core.kv.offloaded import Offload, OffloadedKV
from triforce_core.kv.shaped import PassShape, ShapedBatch, VerifyBatch
from triforce_core.kv.streaming import StreamingKV, WindowSettings
from triforce_core.messages import SequenceSpec, Span
from triforce_core.models import graphs
from triforce_core.models.fallback import say
from triforce_core.models.graphs import EagerPass, ShapedPasses, doubling, shaped_passes
from triforce_core.models.load import ATTENTION, kv_geometry

SHAPES = [PassShape(n, q) for n in (1, 2, 4) for q in (1, 4, 6)]


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 9])]
)
def test_sizes_double_up_to_the_most(most: int, sizes: list[int]) -> None:
    assert doubling(most) == sizes


class Recording:
    """A pass that runs no model: its logits are the number of each token."""

    def __init__(self, batch: ShapedBatch, ran: list[PassShape]) -> None:
        self.batch, self.ran = batch, ran

    def run(self) -> torch.Tensor:
        self.ran.append(self.batch.shape)
        return torch.arange(self.batch.shape.tokens)[:, None].float()


@pytest.mark.parametrize(
    ("lengths", "shape"),
    [
        ([1], (1, 1)),
        ([3], (1, 4)),
        ([1, 1], (2, 1)),
        ([1, 4], (2, 4)),
        ([1, 1, 5], (4, 6)),
        ([6, 2, 3, 1], (4, 6)),
        ([7], None),
        ([1, 1, 1, 1, 1], None),
    ],
    ids=str,
)
def test_a_batch_takes_the_smallest_shape_with_room(lengths: list[int], shape: tuple[int, int] | None) -> None:
    geometry = KVGeometry(1, 2, 8, torch.float32, torch.device("cpu"))
    kv, ran = StreamingKV(geometry, 5, WindowSettings(2, 8, 6), KERNELS["reference"]), list[PassShape]()
    shaped = ShapedPasses([Recording(ShapedBatch(kv, s, kv.slots_each, gathered, workers=1), ran) for s in SHAPES])
    forwards = [Forward(Span(i, 0, random_tokens(n, seed=i), spec(100)), 1) for i, n in enumerate(lengths)]
    logits = shaped.forward(kv.prepare(forwards))
    assert ran == ([] if shape is None else [shape])
    assert (logits is None) == (shape is None)
    assert logits is None or len(logits) == len(lengths), "those of the sampled tokens and no more"


@pytest.mark.parametrize("ranged", [gathered, triton_ranged])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_depends_on_no_value(family: str, ranged: Ranged) -> None:
    """The pass runs on shapes alone, without data: it asks the device for nothing that the host would have to
    wait for.
    """
    model = random_model(family).to("meta", torch.bfloat16)
    model.set_attn_implementation(ATTENTION)
    kv = StreamingKV(kv_geometry(model), 4, WindowSettings(4, 600, 40), KERNELS["reference"])
    full = FullKV(kv_geometry(model), 2000, KERNELS["reference"])
    shape, heads = PassShape(4, 5), model.config.num_attention_heads
    queries = torch.empty(len(full.keys), heads, 20, full.geometry.head_dim, dtype=torch.bfloat16, device="meta")
    for batch in (
        ShapedBatch(kv, shape, kv.slots_each, ranged, 132),
        VerifyBatch(full, shape, 1000, ranged, 132, queries),
    ):
        eager = EagerPass(model, batch)
        assert eager.batch.rooms[0].splits > 1
        assert (eager.run().shape, eager.run().dtype) == ((20, 256), torch.float32)


@pytest.mark.parametrize(
    ("text", "mode"),
    [("", "auto"), ("graphs: off", "off"), ("graphs: eager", "eager"), ("device: cuda:1\ngraphs: on", "on")],
)
def test_the_setting_is_read_as_it_is_written(text: str, mode: str, tmp_path: Path) -> None:
    """In YAML a bare `on` is true."""
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    assert load_settings(path).graphs == mode


@pytest.mark.parametrize(("mode", "shapes"), [("auto", None), ("off", None), ("eager", 9)])
def test_on_the_cpu_there_are_twins_where_they_are_asked_for(mode: str, shapes: int | None) -> None:
    model = random_model()
    kv = StreamingKV(kv_geometry(model), 3, WindowSettings(4, 20, 8), KERNELS["reference"])
    shaped = shaped_passes(model, kv, load_settings(dtype="float32", max_sequences=3, graphs=mode), most_queries=4)
    assert (shaped and len(shaped.passes)) == shapes


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_a_compiler_that_fails_with_attention_alone(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `auto` the passes are the same as without a compiler. With `on` the setting is refused."""

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("no such instruction")

    model = random_model()
    model.set_attn_implementation(ATTENTION)
    kv = StreamingKV(kv_geometry(model), 3, WindowSettings(4, 20, 8), KERNELS["reference"])
    settings = load_settings(dtype="float32", max_sequences=3, graphs="eager", compile=mode)
    monkeypatch.setattr(graphs, "compiled", lambda _: broken)
    if mode == "on":
        with pytest.raises(InvalidValueError, match=r"compile: 'on' needs a compiler.*no such instruction"):
            shaped_passes(model, kv, settings, 4, fused=True, ahead=2)
        return
    shaped = shaped_passes(model, kv, settings, 4, fused=True, ahead=2)
    assert shaped is not None
    assert shaped.forward(kv.prepare([Forward(Span(0, 0, (1,), spec(100)), 1)])) is not None
    for chain in shaped.chains:
        chain.draw(noisy=True)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What our own log has been told."""
    say.cache_clear()
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith("triforce_core")]


class AnyKV(KVCache):
    """A policy that this engine has not met."""

    def slots_for(self, sequence: SequenceSpec) -> int:
        return sequence.max_length

    def place(self, sequence_id: int, held: Held, keep: int, end: int, num_sampled: int) -> Lack:
        return Lack()


def test_a_cache_that_cannot_have_any_is_named_where_graphs_are_asked_for(said: Callable[[], list[str]]) -> None:
    """An offloaded cache copies other KV in each pass. What a policy of another kind does is not known."""
    model = random_model()
    geometry, kernel = kv_geometry(model), KERNELS["reference"]
    offloaded = OffloadedKV(geometry, 100, kernel, Offload())
    heavy = HeavyHitterKV(geometry, 1, HeavyHitterSettings(), kernel, model.config.num_attention_heads)
    host = {"target": {"offload": "host"}}
    expected = [
        (offloaded, host, "with target.offload: host what the target copies differs from pass to pass"),
        (heavy, {}, "the heavy-hitter cache keeps the queries of each pass, which these passes do not"),
        (AnyKV(geometry, 100, kernel), {}, "the cache policy AnyKV has no passes of constant shape"),
    ]
    for mode, device in [("eager", "cpu"), ("on", "cuda:0"), ("auto", "cuda:0")]:
        for kv, given, why in expected:
            settings = load_settings(dtype="bfloat16", device=device, max_sequences=3, graphs=mode, **given)
            before = len(said())
            assert shaped_passes(model, kv, settings, 4) is None
            assert shaped_passes(model, kv, settings, 4) is None
            new = said()[before:]
            assert len(new) == (mode != "auto"), "once, and only where it was asked for"
            assert all(f"graphs: {mode} does nothing here: {why}" in message for message in new)
    shaped = shaped_passes(model, FullKV(geometry, 100, kernel), load_settings(dtype="float32", graphs="eager"), 4)
    assert shaped is not None
    assert all(isinstance(each.batch, VerifyBatch) for each in shaped.passes)


def test_a_captured_target_needs_attention_that_copies_nothing(said: Callable[[], list[str]]) -> None:
    """In float32 a GPU has no such attention: passes would copy every context at its greatest length."""
    model = random_model()
    kv = FullKV(kv_geometry(model), 100, KERNELS["reference"])
    settings = load_settings(device="cuda:0", dtype="float32", max_sequences=3, graphs="on")
    assert shaped_passes(model, kv, settings, 4) is None
    [message] = said()
    assert message.startswith("graphs: on does nothing here: with attention: blocked a graph of the target would copy")


def test_no_memory_for_the_twins_is_said() -> None:
    """The memory is really asked for: no machine has room for such a batch."""
    model = random_model()
    kv = FullKV(kv_geometry(model), 100, KERNELS["reference"])
    settings = load_settings(dtype="float32", max_sequences=2**38, graphs="eager")
    with pytest.raises(
        InvalidValueError, match=r"graphs: 'eager' takes more memory than cpu has .*: lower target.kv_p"
    ):
        shaped_passes(model, kv, settings, 4)


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_no_memory_for_graphs_is_said(
    mode: str, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    """Where graphs are only a default, the passes do without them. An error that is no lack of memory is passed on as
    it is.
    """
    errors: list[Exception] = [
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: device-side assert"),
    ]

    def fails(*_: object) -> None:
        raise errors.pop(0)

    monkeypatch.setattr(graphs, "captured", fails)
    model = random_model()
    kv = StreamingKV(kv_geometry(model), 3, WindowSettings(4, 20, 8), KERNELS["reference"])
    settings = load_settings(device="cuda:0", dtype="float32", max_sequences=3, graphs=mode)
    why = "takes more memory than cuda:0 has (CUDA error: out of memory)"
    lower = "lower target.kv_pool_tokens, retrieval.budget or max_sequences, or set graphs: off"
    remedy = f"to start without this: {lower}"
    if mode == "on":
        with pytest.raises(InvalidValueError) as refused:
            shaped_passes(model, kv, settings, 4)
        assert str(refused.value) == f"graphs: 'on' {why}: {lower}"
    else:
        assert shaped_passes(model, kv, settings, 4) is None
        assert said() == [f"graphs: auto: no graphs, so passes are slower, because graphs {why}; {remedy}"]
    with pytest.raises(RuntimeError, match="device-side assert"):
        shaped_passes(model, kv, settings, 4)
