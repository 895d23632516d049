"""Tests of means, pass@k and paired differences against closed forms and enumeration."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest

from rolemesh.engine.statistics import difference, estimate, pass_chance

# 10,000 draws of a p of 0.04 have a deviation of 0.002: outside of this once in 10^6 seeds.
DRAWN_P = 0.01


def test_a_mean_and_its_standard_error_are_the_closed_form() -> None:
    found = estimate([0.0, 0.0, 1.0, 1.0])
    assert found.mean == 0.5
    assert found.standard_error == pytest.approx(math.sqrt(1 / 3) / 2)
    assert found.num_prompts == 4


def test_the_error_of_a_share_is_the_binomial_one_with_its_sample_correction() -> None:
    n, right = 40, 13
    found = estimate([1.0] * right + [0.0] * (n - right))
    share = right / n
    assert found.standard_error == pytest.approx(math.sqrt(share * (1 - share) / (n - 1)))


def test_one_prompt_has_no_error() -> None:
    assert estimate([0.25]).standard_error is None
    assert estimate([0.25]).told() == "0.250"


@pytest.mark.parametrize("size", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_subsets_in_which_one_passes(size: int) -> None:
    for passed, k in itertools.product(range(size + 1), range(1, size + 1)):
        rows = [index < passed for index in range(size)]
        subsets = list(itertools.combinations(rows, k))
        expected = sum(map(any, subsets)) / len(subsets)
        assert pass_chance(size, passed, k) == pytest.approx(expected)


def test_a_difference_is_that_of_shared_prompts_with_their_paired_error() -> None:
    one = {"a": 0.1, "b": 0.9, "c": 0.4, "x": 1.0}
    other = {"a": 0.3, "b": 1.0, "c": 0.4, "y": 0.0}
    found = difference(one, other)
    assert found is not None
    values = [0.2, 0.1, 0.0]
    assert found.mean == pytest.approx(0.1)
    error = statistics.stdev(values) / math.sqrt(3)
    assert found.standard_error == pytest.approx(error)
    assert (found.low, found.high) == pytest.approx(
        (0.1 - 1.959964 * error, 0.1 + 1.959964 * error)
    )
    assert (found.num_prompts, found.num_others) == (3, 2)


def test_what_is_hard_for_both_cancels() -> None:
    # Prompts differ by far more than the policies, so that errors apart would hide the difference.
    one = {str(n): n / 20 for n in range(20)}
    other = {key: value + 0.05 + 0.01 * (int(key) % 2) for key, value in one.items()}
    found = difference(one, other)
    assert found is not None
    apart = math.hypot(*(estimate(list(x.values())).standard_error or 0.0 for x in (one, other)))
    assert found.standard_error is not None
    assert found.standard_error < apart / 50
    assert found.low is not None
    assert found.low > 0


def test_the_exact_test_counts_the_signs_that_are_as_far_from_zero() -> None:
    zeros = dict.fromkeys("abcd", 0.0)
    found = difference(zeros, dict.fromkeys("abcd", 1.0))
    assert found is not None
    assert found.p_value == pytest.approx(2 / 16)
    mixed = difference(zeros, {"a": 3.0, "b": -1.0, "c": 1.0, "d": 0.0})
    assert mixed is not None
    # Of |+-3 +-1 +-1| all eight are 1, 3, 3 or 5: six reach 3.
    assert mixed.p_value == pytest.approx(6 / 8)


def test_drawn_signs_give_the_binomial_test_of_equal_sizes() -> None:
    values = {str(n): 1.0 if n < 15 else -1.0 for n in range(20)}
    found = difference(dict.fromkeys(values, 0.0), values)
    assert found is not None
    expected = 2 * sum(math.comb(20, k) for k in range(15, 21)) / 2**20
    assert found.p_value == pytest.approx(expected, abs=DRAWN_P)
    again = difference(dict.fromkeys(values, 0.0), values)
    assert again == found


def test_equal_policies_differ_by_nothing_and_strangers_cannot_be_compared() -> None:
    found = difference({"a": 1.0, "b": 0.5}, {"a": 1.0, "b": 0.5})
    assert found is not None
    assert (found.mean, found.standard_error, found.p_value) == (0.0, 0.0, 1.0)
    assert difference({"a": 1.0}, {"b": 1.0}) is None
