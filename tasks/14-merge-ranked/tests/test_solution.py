from solution import merge_ranked


def test_empty():
    assert merge_ranked([], []) == []
    assert merge_ranked([2, 7], []) == [2, 7]
    assert merge_ranked([], [2, 7]) == [2, 7]


def test_interleaved():
    assert merge_ranked([1, 4, 9], [2, 3, 10, 11]) == [1, 2, 3, 4, 9, 10, 11]


def test_one_after_the_other():
    assert merge_ranked([20, 30], [1, 5]) == [1, 5, 20, 30]


def test_two_copies_stay():
    assert merge_ranked([6], [6]) == [6, 6]
    assert merge_ranked([3, 3, 8], [5]) == [3, 3, 5, 8]


def test_more_than_two_copies():
    assert merge_ranked([4, 4, 4, 4], []) == [4, 4]
    assert merge_ranked([2, 2, 2], [2, 2, 3, 3, 3]) == [2, 2, 3, 3]


def test_negative():
    assert merge_ranked([-5, -5, 0], [-5, -1, 0, 0]) == [-5, -5, -1, 0, 0]


def test_long():
    assert merge_ranked(list(range(0, 400, 2)), list(range(1, 400, 2))) == list(range(400))
