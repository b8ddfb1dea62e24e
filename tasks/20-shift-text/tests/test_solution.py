from solution import shift_text


def test_empty():
    assert shift_text("", 5) == ""


def test_key_zero():
    assert shift_text("Same 123!", 0) == "Same 123!"


def test_letters_wrap():
    assert shift_text("xyzXYZ", 3) == "abcABC"


def test_digits_wrap():
    assert shift_text("0589", 4) == "4923"


def test_negative_key():
    assert shift_text("bca", -1) == "abz"
    assert shift_text("A0", -3) == "X7"


def test_large_key():
    assert shift_text("a5", 26) == "a1"
    assert shift_text("Hi 9", 53) == "Ij 2"
    assert shift_text("k3", -260) == "k3"


def test_other_characters_stay():
    assert shift_text("to: me@home, [now]_!", 1) == "up: nf@ipnf, [opx]_!"


def test_there_and_back():
    text = "The 3 Quick Foxes, 2024 - 07 - 19"
    assert shift_text(text, 7) == "Aol 0 Xbpjr Mvelz, 9791 - 74 - 86"
    assert shift_text(shift_text(text, 1234), -1234) == text
