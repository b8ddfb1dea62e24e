from solution import is_even


def test_even():
    assert is_even(2) is True
    assert is_even(38) is True


def test_odd():
    assert is_even(1) is False
    assert is_even(15) is False


def test_zero():
    assert is_even(0) is True


def test_negative():
    assert is_even(-6) is True
    assert is_even(-9) is False


def test_large():
    assert is_even(10**15) is True
    assert is_even(10**15 + 1) is False
