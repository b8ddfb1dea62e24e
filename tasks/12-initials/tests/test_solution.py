from solution import initials


def test_no_words():
    assert initials([]) == ""


def test_one_word():
    assert initials(["tiger"]) == "T"


def test_several_words():
    assert initials(["north", "east", "west", "south"]) == "NEWS"


def test_mixed_case():
    assert initials(["Red", "gREEN", "BLUE"]) == "RGB"


def test_empty_words_are_skipped():
    assert initials(["", "quick", "", "fox", ""]) == "QF"
    assert initials(["", ""]) == ""


def test_digits_stay():
    assert initials(["7up", "cola"]) == "7C"


def test_long():
    assert initials(["ox", "yak"] * 100) == "OY" * 100
