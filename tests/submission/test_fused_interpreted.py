"""The fused kernel under Triton's interpreter, on the CPU, in a process of its own: see conftest.run_interpreted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import check_exact, generate_input
from submission import custom_kernel
from tests.conftest import interpreted, not_interpreted, run_interpreted
from tests.ragged import CACHES, RAGGED, Ragged, fused_plan, hard

triton = pytest.importorskip("triton", reason="needs Triton: pip install -e '.[gfx950]'")


@not_interpreted
def test_the_rest_of_this_file():
    run_interpreted(__file__)


@interpreted
@pytest.mark.parametrize(("splits", "merge"), [(1, "last"), (3, "last"), (3, "kernel"), (8, "kernel")])
@pytest.mark.parametrize("target", ["interpreter", "amd"])
@pytest.mark.parametrize("cache", CACHES)
def test_interpreted(cache, target, splits, merge):
    """float32 throughout, so what is left is its rounding. "amd" lays the fp8 cache out as that target does."""
    case = Ragged([*RAGGED, 130], cache, seed=splits)
    for _ in range(2):
        case.out.fill_(torch.nan)
        for launch in case.launches(fused_plan(cache, splits, merge=merge), target):
            if target == "amd" and "COMPUTE" in launch.constants:
                launch.constants["COMPUTE"] = triton.language.float32
            launch.start()
        assert max(case.errors()) < 1e-3 if cache == "fp8" and splits > 1 else max(case.errors()) < 2e-6
        assert not case.tickets.any()


@interpreted
@pytest.mark.parametrize("cache", CACHES)
def test_interpreted_with_hard_numbers(cache):
    """A query past float16's range and one near its bottom, an outlier channel, a cache of zeros."""
    for scale_q, change in (
        (1e6, lambda kv: kv * 1e-6),
        (1e-6, lambda kv: kv * 1e5),
        (1.0, lambda kv: torch.where(torch.arange(576) == 77, kv * 1000, kv)),
        (1.0, torch.zeros_like),
    ):
        case = hard([40, 33], cache, scale_q, change)
        for launch in case.launches(fused_plan(cache, 1), "interpreter"):
            launch.start()
        if case.held.any():
            assert max(case.errors()) < 2e-5
        else:
            assert not case.out.any()


@interpreted
@settings(max_examples=6, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 3, 5, 15, 16, 17, 33, 48]), min_size=1, max_size=4),
    cache=st.sampled_from(CACHES),
    splits=st.integers(1, 6),
    block=st.sampled_from([16, 32]),
    merge=st.sampled_from(["last", "kernel"]),
)
def test_interpreted_at_any_lengths(lengths, cache, splits, block, merge):
    """Fewer tokens than splits, empty sequences, whole tiles and one token more or less."""
    case = Ragged(lengths, cache, seed=sum(lengths))
    for launch in case.launches(fused_plan(cache, splits, block, merge), "interpreter"):
        launch.start()
    assert max(case.errors()) < (1e-3 if cache == "fp8" and splits > 1 else 2e-6)
    assert not case.tickets.any()


@interpreted
def test_interpreted_as_a_plan():
    """Through custom_kernel. The interpreter cuts bfloat16 off where hardware rounds: twice the error, in budget."""
    data = generate_input(2, 1, 97, 3, device="cpu")
    plan = fused_plan("bf16", 2)
    assert check_exact(data, custom_kernel(data, plan=plan, strict=True), "a16w16").ok
