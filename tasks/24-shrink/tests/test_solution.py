from solution import shrink


def test_single_digits():
    for digit in range(10):
        assert shrink(digit) == (digit, 0)


def test_one_round():
    assert shrink(23) == (6, 1)
    assert shrink(111) == (1, 1)


def test_zeros_are_left_out():
    assert shrink(10) == (1, 1)
    assert shrink(90) == (9, 1)
    assert shrink(2003) == (6, 1)


def test_zeros_in_later_rounds():
    assert shrink(58) == (4, 2)
    assert shrink(255) == (5, 2)


def test_several_rounds():
    assert shrink(99) == (8, 2)
    assert shrink(77) == (8, 4)
    assert shrink(679) == (6, 5)


def test_large():
    assert shrink(10**30) == (1, 1)
    assert shrink(2 * 10**20 + 4) == (8, 1)
    assert shrink(int("9" * 20)) == (4, 5)
