import pytest
from solution import add_minutes


def test_nothing_added():
    assert add_minutes("00:00", 0) == "00:00"
    assert add_minutes("17:08", 0) == "17:08"


@pytest.mark.parametrize(
    ("clock", "minutes", "later"),
    [("12:00", 7, "12:07"), ("08:59", 1, "09:00"), ("10:30", 95, "12:05"), ("01:01", 600, "11:01")],
)
def test_same_day(clock, minutes, later):
    assert add_minutes(clock, minutes) == later


def test_past_midnight():
    assert add_minutes("23:59", 1) == "00:00"
    assert add_minutes("22:45", 200) == "02:05"


def test_backwards():
    assert add_minutes("15:00", -1) == "14:59"
    assert add_minutes("00:00", -1) == "23:59"
    assert add_minutes("03:20", -400) == "20:40"


def test_more_than_a_day():
    assert add_minutes("06:15", 1440) == "06:15"
    assert add_minutes("06:15", 1440 * 30 + 61) == "07:16"
    assert add_minutes("06:15", -1440 * 7 - 16) == "05:59"
