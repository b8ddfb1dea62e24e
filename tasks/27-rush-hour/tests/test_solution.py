from solution import rush_hour


def test_nothing_takes_place():
    assert rush_hour([]) is None
    assert rush_hour([(7, 7), (9, 2)]) is None


def test_one_meeting():
    assert rush_hour([(10, 12)]) == (1, 10, 12)
    assert rush_hour([(10, 12), (11, 11), (12, 11)]) == (1, 10, 12)


def test_nested_and_crossing():
    assert rush_hour([(0, 20), (5, 15), (8, 10)]) == (3, 8, 10)
    assert rush_hour([(6, 11), (0, 9), (8, 14)]) == (3, 8, 9)


def test_same_meeting_twice():
    assert rush_hour([(2, 5), (2, 5), (4, 6), (2, 5)]) == (4, 4, 5)


def test_end_is_not_included():
    assert rush_hour([(1, 3), (3, 5), (6, 8)]) == (1, 1, 5)
    assert rush_hour([(0, 10), (2, 4), (4, 6), (6, 7), (8, 9)]) == (2, 2, 7)


def test_earliest_stretch_even_if_it_is_shorter():
    assert rush_hour([(20, 30), (20, 30), (1, 4), (3, 9)]) == (2, 3, 4)


def test_negative_times():
    assert rush_hour([(-5, 2), (-9, -4), (0, 3)]) == (2, -5, -4)


def test_large():
    meetings = [(n, 1000 + n) for n in range(500)]
    assert rush_hour(meetings) == (500, 499, 1000)
    assert rush_hour([(n, n + 1) for n in range(400, 0, -1)]) == (1, 1, 401)
