"""The fused kernel under Triton's interpreter, on the CPU, in a process of its own: see conftest.run_interpreted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import check_exact, generate_input
from submission import Plan, custom_kernel
from tests.conftest import interpreted, not_interpreted, run_interpreted
from tests.ragged import CACHES, RAGGED, Ragged, fused_plan, hard, with_nan

triton = pytest.importorskip("triton", reason="needs Triton: pip install -e '.[gfx950]'")


@not_interpreted
def test_the_rest_of_this_file():
    run_interpreted(__file__)


def interpret(case: Ragged, plan: Plan, target: str = "interpreter") -> None:
    """Fill case.out. "amd" lays the fp8 cache out as that target does."""
    for launch in case.launches(plan, target):
        if "COMPUTE" in launch.constants:
            launch.constants["COMPUTE"] = triton.language.float32
        launch.start()


@interpreted
@pytest.mark.parametrize(("splits", "merge"), [(1, "last"), (3, "last"), (3, "kernel"), (8, "kernel")])
@pytest.mark.parametrize("target", ["interpreter", "amd"])
@pytest.mark.parametrize("cache", CACHES)
def test_interpreted(cache, target, splits, merge):
    """float32 throughout, so what is left is its rounding."""
    case = Ragged([*RAGGED, 130], cache, seed=splits)
    for _ in range(2):
        case.out.fill_(torch.nan)
        interpret(case, fused_plan(cache, splits, merge=merge), target)
        assert max(case.errors()) < 1e-3 if cache == "fp8" and splits > 1 else max(case.errors()) < 2e-6
        assert not case.tickets.any()


@interpreted
@pytest.mark.parametrize(("splits", "merge"), [(1, "last"), (2, "last"), (2, "kernel"), (5, "last"), (5, "kernel")])
@pytest.mark.parametrize(
    ("cache", "target"),
    [("bf16", "interpreter"), ("fp8", "interpreter"), ("mxfp4", "interpreter"), ("mxfp4", "amd")],
)
def test_nan_interpreted(cache, target, splits, merge):
    """A NaN in the cache is one in all of its sequence's output, and in no other's. The interpreter's own conversion
    takes fp8's NaN for 480, so the layout "amd" of fp8 has this test in test_fused.py alone."""
    case = with_nan(cache)
    interpret(case, fused_plan(cache, splits, merge=merge), target)
    assert case.out[0].isnan().all()
    assert case.errors()[1] < 0.004


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
        interpret(case, fused_plan(cache, 1))
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
    interpret(case, fused_plan(cache, splits, block, merge))
    assert max(case.errors()) < (1e-3 if cache == "fp8" and splits > 1 else 2e-6)
    assert not case.tickets.any()


@interpreted
def test_interpreted_as_a_plan():
    """Through custom_kernel. The interpreter cuts bfloat16 off where hardware rounds: twice the error, in budget."""
    data = generate_input(2, 1, 97, 3, device="cpu")
    plan = fused_plan("bf16", 2)
    assert check_exact(data, custom_kernel(data, plan=plan, strict=True), "a16w16").ok
