from solution import last_item


def test_several():
    assert last_item([9, 1, 5, 7], -1) == 7


def test_one():
    assert last_item(["only"], "other") == "only"


def test_empty():
    assert last_item([], 12) == 12
    assert last_item([], None) is None


def test_last_is_zero_or_empty():
    assert last_item([3, 0], 5) == 0
    assert last_item(["a", ""], "b") == ""


def test_last_is_none():
    assert last_item([1, None], 2) is None


def test_long():
    assert last_item(list(range(1000)), 0) == 999
