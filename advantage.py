"""Advantages from the rewards of grouped trials: RLOO-n, RLOO and GRPO on plain arrays.

A group is the set of trials of one task in one step. Every function takes

    rewards   (B,)  reward of each trial
    groups    (B,)  group of each trial, any hashable label
    excluded  (B,)  True where the trial says nothing about the policy (an infrastructure failure); None: no trial

and returns a float64 array (B,): one advantage per trial, to be used for each of its sampled tokens. An excluded
trial gets exactly 0 and is no part of its group's baseline. A group of equal rewards gets exactly 0, because the
test is on the rewards and not on a rounded difference to their mean.

Leaves out: discounting, reward shaping, whitening over the batch. None of them is part of the ablation.
"""

import numpy as np


def rloo_n(rewards, groups, excluded=None, min_group_size=2) -> np.ndarray:
    """Leave-one-out advantage over the n trials of a group that are not excluded.

    A_i = n / (n - 1) * (R_i - mean(R)) = R_i - mean of the other eligible rewards (Kool et al. 2019, "Buy 4 REINFORCE
    samples, get a baseline for free!"; Ahmadian et al. 2024). A group with fewer than `min_group_size` eligible
    trials gives 0: a baseline of so few samples is noise.
    """
    def leave_one_out(eligible):
        n = len(eligible)
        return n / (n - 1) * (eligible - eligible.mean())

    return _per_group(rewards, groups, excluded, min_group_size, leave_one_out)


def rloo(rewards, groups, excluded=None, min_group_size=2) -> np.ndarray:
    """Leave-one-out advantage of the plain estimator: excluded trials count as reward 0 in the baseline.

    The trials that are excluded still get 0 themselves. What a failed sandbox does to the baseline here is what
    RLOO-n exists to undo.
    """
    rewards, excluded = _checked(rewards, groups, excluded)
    advantages = rloo_n(np.where(excluded, 0.0, rewards), groups, None, min_group_size)
    return np.where(excluded, 0.0, advantages)


def grpo(rewards, groups, excluded=None, min_group_size=2) -> np.ndarray:
    """A_i = (R_i - mean(R)) / (std(R) + 1e-6), std with n - 1 in the divisor (Shao et al. 2024, DeepSeekMath)."""
    def standardised(eligible):
        return (eligible - eligible.mean()) / (eligible.std(ddof=1) + 1e-6)

    return _per_group(rewards, groups, excluded, min_group_size, standardised)


def zero_variance(rewards, groups, excluded=None) -> np.ndarray:
    """Boolean (G,), groups in order of first appearance: True where all eligible rewards are equal or none is left."""
    rewards, excluded = _checked(rewards, groups, excluded)
    return np.array([rows.size == 0 or np.ptp(rewards[rows]) == 0 for rows in _eligible_rows(groups, excluded)])


def _per_group(rewards, groups, excluded, min_group_size, estimator) -> np.ndarray:
    rewards, excluded = _checked(rewards, groups, excluded)
    advantages = np.zeros(len(rewards))
    for rows in _eligible_rows(groups, excluded):
        if rows.size >= max(min_group_size, 2) and np.ptp(rewards[rows]) > 0:
            advantages[rows] = estimator(rewards[rows])
    return advantages


def _eligible_rows(groups, excluded) -> list[np.ndarray]:
    rows_of = {}
    for row, group in enumerate(groups):
        rows_of.setdefault(group, [])
        if not excluded[row]:
            rows_of[group].append(row)
    return [np.array(rows, dtype=np.int64) for rows in rows_of.values()]


def _checked(rewards, groups, excluded) -> tuple[np.ndarray, np.ndarray]:
    rewards = np.asarray(rewards, dtype=np.float64)
    excluded = np.zeros(len(rewards), dtype=bool) if excluded is None else np.asarray(excluded, dtype=bool)
    if not len(rewards) == len(groups) == len(excluded):
        raise ValueError(f"{len(rewards)} rewards, {len(groups)} groups, {len(excluded)} exclusions: lengths differ")
    bad = np.flatnonzero(~np.isfinite(rewards) & ~excluded)
    if bad.size:
        raise ValueError(f"reward of trial {bad[0]} is {rewards[bad[0]]}: only an excluded trial may lack a reward")
    return rewards, excluded
