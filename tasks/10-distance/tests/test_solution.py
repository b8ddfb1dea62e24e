from solution import distance


def test_second_is_larger():
    assert distance(2, 11) == 9


def test_first_is_larger():
    assert distance(30, 12) == 18


def test_same_point():
    assert distance(6, 6) == 0
    assert distance(-6, -6) == 0


def test_both_negative():
    assert distance(-10, -3) == 7
    assert distance(-3, -10) == 7


def test_across_zero():
    assert distance(-4, 5) == 9
    assert distance(4, -5) == 9


def test_large():
    assert distance(-(10**9), 10**9) == 2 * 10**9
