from solution import fewest_stamps


def test_zero_postage():
    assert fewest_stamps(0, {}) == 0
    assert fewest_stamps(0, {5: 3}) == 0


def test_one_kind():
    assert fewest_stamps(9, {3: 3}) == 3
    assert fewest_stamps(10, {10: 1}) == 1


def test_largest_first_is_not_best():
    assert fewest_stamps(12, {10: 1, 6: 2, 1: 5}) == 2
    assert fewest_stamps(30, {25: 1, 10: 3, 1: 9}) == 3


def test_largest_first_finds_nothing():
    assert fewest_stamps(12, {8: 1, 6: 2}) == 2
    assert fewest_stamps(11, {9: 1, 4: 2, 3: 1}) == 3


def test_stock_runs_out():
    assert fewest_stamps(12, {6: 1, 4: 1, 1: 9}) == 4
    assert fewest_stamps(20, {10: 1, 5: 1, 2: 1, 1: 3}) == 6
    assert fewest_stamps(5, {5: 0, 1: 5}) == 5


def test_impossible():
    assert fewest_stamps(5, {}) == -1
    assert fewest_stamps(10, {3: 3}) == -1
    assert fewest_stamps(7, {2: 10, 4: 10}) == -1
    assert fewest_stamps(3, {4: 2}) == -1
    assert fewest_stamps(6, {6: 0}) == -1


def test_large():
    assert fewest_stamps(1000, {7: 150, 11: 60, 50: 10}) == 58
    assert fewest_stamps(2000, {1: 50, 40: 20, 99: 12}) == 44
    assert fewest_stamps(1001, {2: 150, 6: 90, 20: 20}) == -1
