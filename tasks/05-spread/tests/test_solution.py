from solution import spread


def test_empty():
    assert spread([]) == 0


def test_one():
    assert spread([25]) == 0


def test_all_equal():
    assert spread([6, 6, 6]) == 0


def test_unsorted():
    assert spread([4, 19, 1, 12]) == 18
    assert spread([30, 2]) == 28


def test_negative():
    assert spread([-8, -3, -20]) == 17
    assert spread([-5, 0, 9]) == 14


def test_large():
    assert spread(list(range(500, -501, -1))) == 1000
