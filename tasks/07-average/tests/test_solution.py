import pytest
from solution import average


def test_empty():
    assert average([]) == 0.0


def test_one():
    assert average([7]) == pytest.approx(7.0)


def test_fraction():
    assert average([1, 1, 2]) == pytest.approx(4 / 3)
    assert average([0.1, 0.2, 0.6]) == pytest.approx(0.3)


def test_negative():
    assert average([-3, -5]) == pytest.approx(-4.0)
    assert average([-6, 6]) == pytest.approx(0.0)


def test_not_the_middle_value():
    assert average([0, 1, 100, 3]) == pytest.approx(26.0)


def test_large():
    assert average(list(range(1, 1001))) == pytest.approx(500.5)
