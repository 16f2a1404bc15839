"""The microbenchmark of attention runs, here with the one way that a CPU has, and attends to what it says."""

from __future__ import annotations

import pytest
import torch
from triforce_tools.bench.attention import CASES, AttentionCase, Way, bench_attention, inputs, items_of, ways

from tests.fake_cuda import fake_cuda
from triforce_core.attention.cuda_flash import flash_ranged
from triforce_core.attention.flash_decoding import triton_ranged
from triforce_core.attention.ranged import gathered, over_items
from triforce_core.attention.reference import reference
from triforce_core.kv.shaped import VerifyBatch

CPU = torch.device("cpu")


def test_each_way_and_case_has_a_time() -> None:
    cases, said = (AttentionCase(4, 2, 3, 600, 700, 16), AttentionCase(4, 4, 1, 300, 300, 16)), list[str]()
    found = bench_attention(CPU, torch.float32, cases, said.append)
    assert [(each["way"], each["keys"]) for each in found["attention"]] == [("gathered", 600), ("gathered", 300)]
    for each in found["attention"]:
        assert each["us"] > 0
        read = 2 * each["kv_heads"] * each["keys"] * 16 * 4
        assert each["share"] == pytest.approx(read / each["us"] / 1e3 / found["copy_bandwidth_gb_s"])
    assert len(said) == 2


@pytest.mark.parametrize("workers", [1, 20])
def test_the_items_are_the_whole_range(workers: int) -> None:
    case = AttentionCase(4, 2, 3, 1900, 4096, 16)
    pools, query = inputs(case, CPU, torch.float32)
    items = items_of(Way(gathered, workers), case, CPU)
    assert (items.splits > 1) == (workers > 1)
    past = over_items(gathered, query, *pools[0], 0.25, items)
    weights = past.lse.softmax(0).unsqueeze(-1)
    expected = reference(query.flatten(0, 2), *pools[0], 0.25, False).output
    torch.testing.assert_close((weights * past.output).sum(0).flatten(0, 2), expected, atol=1e-5, rtol=0)


def test_both_contexts_are_measured_with_one_range_of_true_length() -> None:
    """There is also a short text in a pass with room for a long one, because the number of splits may depend on the
    room.
    """
    assert {(case.keys, case.longest) for case in CASES} == {
        (4_096, 4_096),
        (124_928, 124_928),
        (4_096, 124_928),
    }
    assert {case.heads // case.kv_heads for case in CASES} == {1, 4}
    assert ways(CPU).keys() == {"gathered"}


def test_the_target_s_cases_have_the_items_of_its_passes() -> None:
    """A pass of the target has at least four items for each sequence, whichever way attends to them."""
    target, retrieval = ([case for case in CASES if (case.longest > 4_096) == long] for long in (True, False))
    for case in target:
        assert items_of(Way(gathered, 1), case, CPU).splits == VerifyBatch.LEAST_SPLITS == 4
        assert items_of(Way(gathered, 264), case, CPU).splits == 264 // case.kv_heads
    assert {items_of(Way(gathered, 1), case, CPU).splits for case in retrieval} == {1}


def test_on_a_gpu_our_kernel_is_compared_with_flash_attention() -> None:
    with fake_cuda():
        found = {name: (way.ranged, way.workers) for name, way in ways(torch.device("cuda")).items()}
    for name, ranged in (("triton_ranged", triton_ranged), ("flash_ranged", flash_ranged)):
        assert [found[f"{name}, {each} each"] for each in (1, 2, 4)] == [(ranged, 132 * each) for each in (1, 2, 4)]
    assert len(found) == 6
