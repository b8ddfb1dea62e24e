from solution import double_all


def test_empty():
    assert double_all([]) == []


def test_one():
    assert double_all([8]) == [16]


def test_order_is_kept():
    assert double_all([9, 3, 7, 3]) == [18, 6, 14, 6]


def test_zero_and_negative():
    assert double_all([0, -4, 6]) == [0, -8, 12]


def test_fractions():
    assert double_all([0.5, 1.25]) == [1.0, 2.5]


def test_long():
    assert double_all(list(range(300))) == list(range(0, 600, 2))
