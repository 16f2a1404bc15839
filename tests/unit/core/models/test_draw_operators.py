"""What a draw costs in operators and waits of the host; and that it draws what the first release drew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.compiling import needs_a_compiler, nothing_compiles
from triforce_core.config import load_settings
from triforce_core.errors import InvalidValueError
from triforce_core.kv.base import Held
from triforce_core.messages import GREEDY, SamplingParams, SequenceSpec
from triforce_core.models import fuse as fusing
from triforce_core.models.drawing import NO_TOKEN, Drawer
from triforce_core.models.fuse import fused_noisiest
from triforce_core.sampling.draw import Draw, draw_tokens, drawn, keys_of, noisiest, perturbed_logits
from triforce_core.sampling.warp import warp

MASK = 0xFFFFFFFF
CPU = torch.device("cpu")


# -- The sampler of the first release: as it was, so that requests go on as they began. --------------------------------


def first_mix(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & MASK
    return x ^ (x >> 15)


def first_gumbel(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    low, high = seeds & MASK, (seeds >> 32) & MASK
    first = first_mix(first_mix(first_mix(low) ^ high) ^ positions)
    second = first_mix(first_mix(first_mix(high ^ 0x9E3779B9) ^ low) ^ (positions ^ 0x85EBCA6B))
    bits = first_mix(first_mix(token_ids ^ first) ^ second)
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-32
    return -torch.log(-torch.log(uniform))


def first_warp(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    warped = logits / torch.tensor([p.temperature or 1.0 for p in params])[:, None]
    truncated = [i for i, p in enumerate(params) if p.temperature and p.truncates]
    if truncated:
        warped[truncated] = first_truncate(warped[truncated], [params[i] for i in truncated])
    return warped


def first_truncate(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    vocab = logits.shape[-1]
    top_k, top_p, min_p = torch.tensor(
        [
            [float(min(p.top_k, vocab) or vocab) for p in params],
            [p.top_p if p.top_p < 1 else torch.inf for p in params],
            [p.min_p for p in params],
        ]
    ).unsqueeze(-1)
    ranks = torch.arange(vocab)
    ranked = ranked.masked_fill(ranks >= top_k, -torch.inf)
    probabilities = ranked.softmax(-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    ranked = ranked.masked_fill((mass_before >= top_p) & (ranks > 0), -torch.inf)
    ranked = ranked.masked_fill(ranked < ranked[:, :1] + min_p.log(), -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter(-1, order, ranked)


def first_perturbed(logits: Tensor, draws: list[Draw]) -> Tensor:
    perturbed = first_warp(logits.float(), [d.sampling for d in draws]).double()
    for row, draw in enumerate(draws):
        if draw.sampling.temperature:
            token_ids = perturbed[row].isfinite().nonzero()[:, 0]
            noise = first_gumbel(torch.tensor(draw.seed), torch.tensor(draw.position), token_ids)
            perturbed[row, token_ids] += noise
    return perturbed


# -- The same values, hence the same tokens ----------------------------------------------------------------------------

samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.05, 0.6, 1.0, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 50, 10_000]),
    top_p=st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.5, 1e-6, 1e-60]),
    min_p=st.sampled_from([0.0, 0.0, 0.001, 0.3, 1.0]),
)
draws_of = st.builds(Draw, samplings, seed=st.integers(-(2**63), 2**63 - 1), position=st.integers(0, 2**20))


def logits_of(rows: int, vocab: int, seed: int, step: float) -> Tensor:
    """Random logits, of which many are excluded, and of which many are equal where `step` is large."""
    random = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(rows, vocab, generator=random) / step).round() * step
    return logits.masked_fill(torch.rand(rows, vocab, generator=random) < 0.2, -torch.inf)


@given(
    st.lists(draws_of, min_size=1, max_size=6),
    st.sampled_from([1, 2, 33, 400]),
    st.integers(0, 10**6),
    st.sampled_from([1e-6, 1.0]),
)
@example([Draw(SamplingParams(), 1, 2), Draw(GREEDY, 1, 3), Draw(SamplingParams(top_p=0.5), 1, 4)], 33, 0, 1.0)
@example([Draw(SamplingParams(), 1, 2), Draw(SamplingParams(), 1, 3)], 33, 0, 1.0)
def test_each_draw_is_that_of_the_first_release(draws: list[Draw], vocab: int, seed: int, step: float) -> None:
    """Draws are equal bit for bit, alone and in a batch, with excluded tokens and with ties."""
    logits = logits_of(len(draws), vocab, seed, step)
    before, expected = logits.clone(), first_perturbed(logits, draws)
    assert torch.equal(warp(logits, [d.sampling for d in draws]), first_warp(logits, [d.sampling for d in draws]))
    assert torch.equal(perturbed_logits(logits, draws), expected)
    assert draw_tokens(logits, draws) == expected.argmax(-1).tolist()
    assert torch.equal(logits, before), "the caller's logits stay as they were"


class Grammar:
    """A grammar of outputs whose tokens are even. If it is not `possible`, it allows no token."""

    def __init__(self, *, possible: bool) -> None:
        self.possible = possible

    def masks(self, before: list[int], after: list[int], unchanged: int, stops: tuple[int, ...]) -> Tensor:
        return ((torch.arange(40) % 2 == 0) & self.possible).expand(len(after) + 1, -1)


def edited_drawer(sampling: SamplingParams, *, possible: bool = True, grammar: bool = True) -> Drawer:
    """The drawer of a tier that holds sequence 1, whose parameters are `sampling`, and sequence 2, which is greedy."""
    text = [3, 5, 5, 7, 30, 30, 2, 9]
    spec = SequenceSpec(sampling, 2**40 + 5, 3, 100, (0,), "any" if grammar else "")
    kv = SimpleNamespace(
        held={1: Held(spec, text), 2: Held(SequenceSpec(GREEDY, 0, 1, 100), text)},
        geometry=SimpleNamespace(device=CPU),
    )
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=40))
    runner: Any = SimpleNamespace(kv=kv, model=model, noisiest=noisiest)
    grammars: Any = SimpleNamespace(state=lambda *_, **__: Grammar(possible=possible))
    return Drawer(runner, grammars, wait_for_grammars=True)


edits = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.6, 1.0]),
    top_p=st.sampled_from([1.0, 0.9]),
    top_k=st.sampled_from([0, 5]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    min_tokens=st.sampled_from([0, 7]),
    logit_bias=st.sampled_from([(), ((2, 5.0), (30, -100.0))]),
    bad_word_ids=st.sampled_from([(), ((4,), (9, 6))]),
)


@given(edits, st.booleans(), st.booleans(), st.integers(0, 10**6))
def test_edited_logits_are_drawn_as_in_the_first_release(
    sampling: SamplingParams, grammar: bool, possible: bool, seed: int
) -> None:
    """Penalties, biases, masks and excluded tokens are beside a greedy sequence without any."""
    drawer = edited_drawer(sampling, possible=possible, grammar=grammar)
    logits = {1: logits_of(3, 40, seed, 1e-6), 2: logits_of(2, 40, seed + 1, 1.0)}
    edited, draws = drawer._edited(logits), drawer._draws(logits)
    expected = first_perturbed(edited, draws).argmax(-1)
    tokens = torch.where(edited.isneginf().all(-1), NO_TOKEN, expected).tolist()
    if grammar and not possible:
        assert tokens[:3] == [NO_TOKEN] * 3
    assert edited_drawer(sampling, possible=possible, grammar=grammar).draw(logits) == {1: tokens[:3], 2: tokens[3:]}


# -- Operators and waits -----------------------------------------------------------------------------------------------


class Operators(TorchDispatchMode):
    """Records the names of all operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


ALL = SamplingParams(0.6, top_k=20, top_p=0.9, min_p=0.05)


@pytest.mark.parametrize(
    ("sampling", "most"),
    [
        (GREEDY, 2),
        (SamplingParams(), 36),  # the first release: 112
        (SamplingParams(0.6), 38),
        (SamplingParams(0.6, top_k=20), 46),  # 143
        (SamplingParams(0.6, top_p=0.9), 47),  # 143
        (SamplingParams(0.6, min_p=0.1), 46),  # 143
        (ALL, 60),  # 144
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [1, 7])
def test_a_draw_has_few_operators(sampling: SamplingParams, most: int, rows: int) -> None:
    """On a GPU each operator is a kernel, unless operators are compiled. No operator's size depends on values."""
    with Operators() as operators:
        draw_tokens(torch.randn(rows, 300), [Draw(sampling, 1, position) for position in range(rows)])
    assert len(operators.called) <= most, operators.called
    assert not {"nonzero", "_local_scalar_dense", "item"} & {*operators.called}


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Tensors of a GPU without data. Whatever would make the host wait for the GPU raises."""
    monkeypatch.setattr("triforce_core.transfer.staged", lambda numbers, dtype, _: torch.tensor(numbers, dtype=dtype))
    with FakeTensorMode():
        yield torch.device("cuda", 0)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(), ALL], ids=str)
@pytest.mark.parametrize("beside", [None, GREEDY, SamplingParams(0.6)], ids=str)
def test_the_host_waits_for_nothing_before_the_tokens(
    sampling: SamplingParams, beside: SamplingParams | None, fake_cuda: torch.device
) -> None:
    params = [sampling, beside or sampling]
    tokens = drawn(torch.empty(2, 300, device=fake_cuda), [Draw(each, 1, 2) for each in params])
    assert (tokens.shape, tokens.dtype, tokens.device) == ((2,), torch.int64, fake_cuda)
    with pytest.raises(Exception, match="_local_scalar_dense"):
        tokens.tolist()


def test_a_tier_waits_once_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits once even where parameters edit the logits and may exclude all tokens. The tensors have shapes and no
    data, so any other question for a value raises.
    """
    waits, device = list[Tensor](), torch.device("meta")

    def tolist(tensor: Tensor) -> list[int]:
        assert tensor.device == device
        waits.append(tensor)
        return [0] * len(tensor)

    monkeypatch.setattr(Tensor, "tolist", tolist)
    for sampling in (GREEDY, SamplingParams(), ALL):
        edited = SamplingParams(
            *(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, 1.2, 0.1, 0.2, 99),
            logit_bias=((3, 1.0),),
            bad_word_ids=((4,), (9, 6)),
        )
        for params, grammar in ((sampling, False), (edited, True)):
            drawer = edited_drawer(params, grammar=grammar)
            drawer.runner.kv.geometry.device = device  # type: ignore[misc]
            waits.clear()
            drawer.draw({1: torch.empty(3, 40, device=device), 2: torch.empty(1, 40, device=device)})
            assert len(waits) == 1


# -- Compiled ----------------------------------------------------------------------------------------------------------

FUSED = load_settings(dtype="float32", compile="on")


@needs_a_compiler
@pytest.mark.ci
def test_compiled_it_draws_the_same_and_is_compiled_twice() -> None:
    """One compilation is for one row, the other for all other numbers of rows."""
    torch._dynamo.reset()
    counters.clear()
    fused = fused_noisiest(FUSED, 300, CPU)
    assert counters["stats"]["unique_graphs"] == 2
    with nothing_compiles(), torch.inference_mode():
        for rows in (1, 2, 5, 64):
            draws = [Draw(SamplingParams(0.7), 5, position) for position in range(rows)]
            draws[0] = Draw(ALL, 5, 0)
            logits = logits_of(rows, 300, rows, 1e-6)
            assert torch.equal(drawn(logits, draws, fused), drawn(logits, draws))
            mixed = [Draw(GREEDY, 1, 1), *draws]
            more = torch.cat([logits[:1], logits])
            assert torch.equal(drawn(more, mixed, fused), drawn(more, mixed))
        ties = torch.zeros(3, 300).index_fill_(1, torch.tensor([17, 250]), torch.inf)
        assert fused(ties, torch.ones(3, 2, dtype=torch.int64)).tolist() == [17] * 3, "the lowest id wins a tie"
    torch._dynamo.reset()


def test_without_a_compiler_it_is_drawn_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Tensor:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(fusing, "compiled", lambda _: broken)
    assert fused_noisiest(load_settings(compile="auto"), 300, CPU) is noisiest
    with pytest.raises(InvalidValueError, match="no such instruction"):
        fused_noisiest(FUSED, 300, CPU)


def test_keys_are_numbers_of_the_host() -> None:
    """A key is two words below 2**32, for each row that has noise."""
    draws = [Draw(SamplingParams(), -1, 9), Draw(GREEDY, 1, 2), Draw(SamplingParams(), 7, 11)]
    keys = keys_of(draws, [0, 2], CPU)
    assert [f"{word:08x}" for word in keys[1].tolist()] == ["ef1a5131", "42f47b46"]  # as test_noise.py has them
    assert keys.min() >= 0
    assert keys.max() < 2**32
