from solution import add_two


def test_positive():
    assert add_two(3, 9) == 12
    assert add_two(9, 3) == 12


def test_zero():
    assert add_two(0, 0) == 0
    assert add_two(0, 6) == 6
    assert add_two(6, 0) == 6


def test_negative():
    assert add_two(-4, -7) == -11
    assert add_two(8, -8) == 0
    assert add_two(2, -10) == -8


def test_fractions():
    assert add_two(0.5, 0.25) == 0.75
    assert add_two(-1.5, 4) == 2.5


def test_large():
    assert add_two(10**12, 10**12 + 1) == 2000000000001
