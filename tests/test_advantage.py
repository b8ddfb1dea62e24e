"""advantage.py: values worked by hand; A_i = R_i - mean of the other eligible rewards of the group."""

import numpy as np
import pytest

from advantage import grpo, rloo, rloo_n, zero_variance

ONE_GROUP = [0] * 8
ESTIMATORS = pytest.mark.parametrize("estimator", [rloo_n, rloo, grpo])


def close(found, expected):
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)


def test_two_winners_of_eight():
    # a winner: 1 - 1/7 = 6/7 = 0.857143; a loser: 0 - 2/7 = -0.285714
    found = rloo_n([1, 0, 0, 1, 0, 0, 0, 0], ONE_GROUP, min_group_size=4)
    w, l = 6 / 7, -2 / 7
    close(found, [w, l, l, w, l, l, l, l])
    np.testing.assert_allclose(found[:2], [0.857143, -0.285714], atol=5e-7)


def test_excluded_rows_are_no_part_of_the_baseline():
    # six rows are left: a winner 1 - 1/5 = 0.8, a loser 0 - 2/5 = -0.4
    excluded = [False, False, True, False, True, False, False, False]
    close(rloo_n([1, 0, 0, 1, 0, 0, 0, 0], ONE_GROUP, excluded, 4), [0.8, -0.4, 0, 0.8, 0, -0.4, -0.4, -0.4])


def test_the_reward_of_an_excluded_row_does_not_matter():
    excluded = [False, False, True, False]
    expected = [1 - 0.25, 0.5 - 0.5, 0, 0 - 0.75]  # R_i - mean of the other two
    for reward in (0.0, 1e9, float("nan"), float("-inf"), None):
        close(rloo_n([1, 0.5, reward, 0], [0] * 4, excluded), expected)


def test_fractional_rewards():
    # 0.5 - 1.25/3, 1 - 0.75/3, 0 - 1.75/3, 0.25 - 1.5/3
    found = rloo_n([0.5, 1, 0, 0.25], [0] * 4, min_group_size=4)
    close(found, [0.5 - 1.25 / 3, 0.75, -1.75 / 3, -0.25])
    np.testing.assert_allclose(found, [0.083333, 0.75, -0.583333, -0.25], atol=5e-7)


def test_a_group_below_the_minimum_size_gives_zero():
    excluded = [False] * 3 + [True] * 5
    rewards = [1, 0, 1, 0, 0, 0, 0, 0]
    assert (rloo_n(rewards, ONE_GROUP, excluded, min_group_size=4) == 0).all()
    close(rloo_n(rewards, ONE_GROUP, excluded, min_group_size=3), [0.5, -1, 0.5, 0, 0, 0, 0, 0])
    close(rloo_n(rewards, ONE_GROUP, excluded), [0.5, -1, 0.5, 0, 0, 0, 0, 0])  # the default is 2


@ESTIMATORS
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.5])
def test_equal_rewards_give_zero(estimator, reward):
    assert (estimator([reward] * 8, ONE_GROUP, min_group_size=4) == 0.0).all()


@ESTIMATORS
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_flat_groups_give_exactly_zero(estimator, dtype):
    # the mean of three 0.1 is 0.10000000000000002, and a division by a tiny std would blow that up
    assert np.mean([0.1] * 3) != 0.1
    rewards = np.array([0.1] * 8 + [0.1] * 3 + [0.7] * 6, dtype=dtype)
    assert (estimator(rewards, ONE_GROUP + [1] * 3 + [2] * 6) == 0.0).all()


def test_a_group_is_flat_when_only_excluded_rows_differ():
    excluded = [False, False, False, True]
    assert (rloo_n([0.3, 0.3, 0.3, 1.0], [0] * 4, excluded) == 0.0).all()
    assert zero_variance([0.3, 0.3, 0.3, 1.0], [0] * 4, excluded).tolist() == [True]


@ESTIMATORS
@pytest.mark.parametrize("min_group_size", [1, 2])
def test_a_group_of_one_gives_zero(estimator, min_group_size):
    found = estimator([1.0, 0.25, 0.5], ["a", "b", "c"], min_group_size=min_group_size)
    assert (found == 0.0).all()


def test_all_rows_excluded_give_zero():
    assert (rloo_n([1, 0, None], [0] * 3, [True] * 3) == 0.0).all()


def test_no_rows_give_no_advantages():
    assert rloo_n([], []).shape == (0,)
    assert zero_variance([], []).shape == (0,)


def test_group_labels_may_be_interleaved_and_of_any_kind():
    # group "x" has rewards 1, 0, 0 and ("y", 2) has 0.5, 0, 1
    groups = ["x", ("y", 2), "x", ("y", 2), ("y", 2), "x"]
    close(rloo_n([1, 0.5, 0, 0, 1, 0], groups), [1, 0, -0.5, -0.75, 0.75, -0.5])


@ESTIMATORS
def test_eligible_rows_of_every_group_sum_to_zero(estimator):
    rng = np.random.default_rng(7)
    groups = rng.integers(0, 9, 80)
    found = estimator(rng.random(80), groups)
    assert np.abs(found).max() > 0.1
    for group in range(9):
        assert abs(found[groups == group].sum()) < 1e-12


def test_plain_rloo_counts_an_excluded_row_as_zero():
    # baselines of the others: (0 + 0 + 0)/3, (1 + 0 + 0)/3, (1 + 0 + 0)/3; the excluded row itself gets 0
    close(rloo([1, 0, 0.9, 0], [0] * 4, [False, False, True, False]), [1, -1 / 3, 0, -1 / 3])
    close(rloo([1, 0, None, 0], [0] * 4, [False, False, True, False]), [1, -1 / 3, 0, -1 / 3])


def test_rloo_without_exclusions_is_rloo_n():
    rewards, groups = [1, 0, 0.5, 1, 0, 0], [0, 0, 0, 1, 1, 1]
    close(rloo(rewards, groups), rloo_n(rewards, groups))


def test_grpo_by_hand():
    # mean 0.5, squared deviations 4 x 0.25, std = sqrt(1/3)
    z = 0.5 / ((1 / 3) ** 0.5 + 1e-6)
    close(grpo([1, 0, 1, 0], [0] * 4), [z, -z, z, -z])
    # the excluded row changes nothing: 1, 0 -> mean 0.5, std = sqrt(0.5)
    z = 0.5 / (0.5 ** 0.5 + 1e-6)
    close(grpo([1, 7, 0], [0] * 3, [False, True, False]), [z, 0, -z])


def test_grpo_standardises_within_the_group():
    # [0, 1] and [0, 10] are the same after division by their own std, but for the 1e-6
    found = grpo([0, 1, 0, 10], [0, 0, 1, 1])
    np.testing.assert_allclose(found, [-2 ** -0.5, 2 ** -0.5] * 2, rtol=2e-6)


def test_zero_variance_in_order_of_first_appearance():
    rewards = [1, 0, 1, 0, 0.5, 1]
    groups = ["b", "a", "b", "a", "c", "a"]
    assert zero_variance(rewards, groups).tolist() == [True, False, True]  # b, a, c
    excluded = [True, False, True, False, False, True]
    assert zero_variance(rewards, groups, excluded).tolist() == [True, True, True]  # b: none left; a: 0, 0


def test_different_lengths_raise():
    with pytest.raises(ValueError, match="3 rewards, 2 groups, 3 exclusions: lengths differ"):
        rloo_n([1, 0, 1], [0, 0])
    with pytest.raises(ValueError, match="2 rewards, 2 groups, 1 exclusions"):
        grpo([1, 0], [0, 0], [False])


@ESTIMATORS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None])
def test_a_missing_reward_raises_unless_excluded(estimator, bad):
    with pytest.raises(ValueError, match="reward of trial 1 is (nan|inf)"):
        estimator([1, bad, 0], [0] * 3)
    assert np.isfinite(estimator([1, bad, 0], [0] * 3, [False, True, False])).all()
