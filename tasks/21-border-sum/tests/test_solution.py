from solution import border_sum


def test_empty():
    assert border_sum([]) == 0


def test_one_cell():
    assert border_sum([[13]]) == 13


def test_one_row():
    assert border_sum([[4, 1, 7, 2]]) == 14


def test_one_column():
    assert border_sum([[3], [8], [5], [1]]) == 17


def test_two_rows_or_columns():
    assert border_sum([[1, 2, 3], [4, 5, 6]]) == 21
    assert border_sum([[1, 2], [3, 4], [5, 6]]) == 21


def test_inside_does_not_count():
    assert border_sum([[1, 1, 1, 1], [1, 50, 60, 1], [1, 70, 80, 1], [1, 1, 1, 1]]) == 12
    assert border_sum([[0, 0, 0, 0, 0], [2, 9, 9, 9, 3], [0, 0, 0, 0, 0]]) == 5


def test_negative():
    assert border_sum([[-1, 2, -3], [4, -100, 6], [-7, 8, -9]]) == 0


def test_large():
    assert border_sum([[1] * 40 for _ in range(30)]) == 136
