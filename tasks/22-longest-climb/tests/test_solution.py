from solution import longest_climb


def test_empty():
    assert longest_climb([]) == []


def test_one():
    assert longest_climb([-3]) == [-3]


def test_always_falling():
    assert longest_climb([9, 7, 2, 0]) == [9]


def test_always_rising():
    assert longest_climb([-8, -1, 0, 20]) == [-8, -1, 0, 20]


def test_equal_numbers_end_a_climb():
    assert longest_climb([1, 2, 2, 3, 4]) == [2, 3, 4]
    assert longest_climb([6, 6, 6]) == [6]


def test_climb_at_each_end():
    assert longest_climb([1, 5, 9, 2, 4]) == [1, 5, 9]
    assert longest_climb([8, 3, 0, 4, 6]) == [0, 4, 6]


def test_first_of_equals():
    assert longest_climb([3, 7, 1, 9, 0, 2]) == [3, 7]


def test_long():
    assert longest_climb(list(range(50)) + list(range(60)) + list(range(55))) == list(range(60))
