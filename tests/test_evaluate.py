"""evaluate.py: pass@k by hand, summaries with lost trials, one line for bad input."""

import sys
from math import comb
from types import SimpleNamespace

import pytest

import evaluate
from evaluate import pass_at_k, summarise


@pytest.mark.parametrize("n, c, k, expected", [
    (5, 2, 1, 0.4),  # 2/5
    (5, 2, 2, 0.7),  # 1 - C(3,2)/C(5,2) = 1 - 3/10
    (5, 2, 3, 0.9),  # 1 - C(3,3)/C(5,3) = 1 - 1/10
    (5, 2, 4, 1.0),  # three failures cannot fill four places
    (5, 0, 1, 0.0),
    (5, 0, 5, 0.0),
    (5, 5, 1, 1.0),
    (8, 1, 8, 1.0),
    (1, 0, 1, 0.0),
    (1, 1, 1, 1.0),
])
def test_pass_at_k_by_hand(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, rel=1e-12)


def test_pass_at_k_is_the_share_of_subsets_with_a_pass():
    for c in range(6):
        subsets = [{i, j, m} for i in range(6) for j in range(i) for m in range(j)]
        assert len(subsets) == comb(6, 3)
        share = sum(any(i < c for i in subset) for subset in subsets) / len(subsets)
        assert pass_at_k(6, c, 3) == pytest.approx(share, rel=1e-12)


def test_pass_at_k_of_many_samples():
    assert pass_at_k(1000, 500, 1) == 0.5
    assert pass_at_k(1000, 1, 100) == pytest.approx(0.1)


@pytest.mark.parametrize("n, k", [(5, 6), (0, 1), (5, 0), (5, -1)])
def test_pass_at_k_needs_k_samples(n, k):
    with pytest.raises(ValueError, match=f"pass@{k} needs at least {k} samples, found {n}"):
        pass_at_k(n, 0, k)


def trials(**outcomes):
    """task=outcomes as one string: p passed, f failed, t timeout, i lost by the infrastructure."""
    names = {"p": "passed", "f": "failed", "t": "timeout", "i": "infra"}
    return [SimpleNamespace(task=task, outcome=names[letter], reward={"p": 1.0, "i": None}.get(letter, 0.9))
            for task, letters in outcomes.items() for letter in letters]


def test_summarise_is_the_mean_over_tasks():
    # pass@1: (2/4 + 0 + 1)/3; pass@2: (1 - C(2,2)/C(4,2) + 0 + 1)/3 = (5/6 + 1)/3
    found = summarise(trials(a="ppff", b="fttf", c="pppp"), [1, 2])
    assert found == {"pass_at_1": pytest.approx(0.5), "pass_at_2": pytest.approx(11 / 18)}


def test_lost_trials_are_no_trials():
    # a: 1 of 2 left; b: none left and so no task; c: 0 of 4. pass@1 (1/2 + 0)/2, pass@2 (1 + 0)/2, pass@3 of c alone
    found = summarise(trials(a="ipif", b="iiii", c="ffff"), [1, 2, 3])
    assert found == {"pass_at_1": 0.25, "pass_at_2": 0.5, "pass_at_3": 0.0}
    assert summarise(trials(a="pi"), [2]) == {"pass_at_2": None}
    assert summarise([], [1]) == {"pass_at_1": None}


def run_main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *arguments])
    evaluate.main()


@pytest.mark.parametrize("arguments, line", [
    (["--samples", "4", "--k", "1,8"], "pass@8 needs at least 8 samples, found 4"),
    (["rollout.temperature=0"], "override: rollout.temperature: expected a number > 0, found 0"),
    ([], "nowhere/tasks"),
])
def test_bad_input_is_one_line_and_exit_status_2(monkeypatch, capsys, tmp_path, arguments, line):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        run_main(monkeypatch, "--model", "nowhere/model", "--tasks", "nowhere/tasks", *arguments)
    printed = capsys.readouterr().err
    assert exit_.value.code == 2 and printed.startswith("evaluate.py: ") and line in printed
    assert printed.count("\n") == 1


def test_help_shows_an_example(monkeypatch, capsys):
    with pytest.raises(SystemExit) as exit_:
        run_main(monkeypatch, "--help")
    assert exit_.value.code == 0 and "python evaluate.py --model" in capsys.readouterr().out
