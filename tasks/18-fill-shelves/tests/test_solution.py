from solution import fill_shelves


def test_no_books():
    assert fill_shelves([], 10) == []


def test_one_book():
    assert fill_shelves([4], 10) == [[4]]


def test_exact_fit():
    assert fill_shelves([6, 4, 1], 10) == [[6, 4], [1]]


def test_order_is_kept_even_if_space_is_left():
    assert fill_shelves([7, 5, 3, 2, 1], 8) == [[7], [5, 3], [2, 1]]


def test_too_wide_first():
    assert fill_shelves([12, 1, 2], 10) == [[12], [1, 2]]


def test_too_wide_last_and_in_a_row():
    assert fill_shelves([1, 15, 11, 20], 10) == [[1], [15], [11], [20]]


def test_one_per_shelf():
    assert fill_shelves([3, 3, 3], 3) == [[3], [3], [3]]


def test_long():
    assert fill_shelves([1] * 105, 10) == [[1] * 10] * 10 + [[1] * 5]
