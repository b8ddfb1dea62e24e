from solution import count_above


def test_empty():
    assert count_above([], 3) == 0


def test_all_or_none():
    assert count_above([7, 8, 9, 10], 6) == 4
    assert count_above([1, 2, 3], 6) == 0


def test_equal_does_not_count():
    assert count_above([4, 3, 4, 5], 4) == 1


def test_repeats_count_each():
    assert count_above([12, 1, 12, 12], 10) == 3


def test_negative():
    assert count_above([-9, -2, 0, 4], -3) == 3


def test_long():
    assert count_above(list(range(1000)), 899) == 100
