from solution import count_vowels


def test_empty():
    assert count_vowels("") == 0


def test_no_vowels():
    assert count_vowels("rhythm, 42!") == 0


def test_each_vowel():
    for letter in "aeiouAEIOU":
        assert count_vowels(letter) == 1


def test_upper_case():
    assert count_vowels("ORANGE Umbrella") == 6


def test_repeated_vowels():
    assert count_vowels("queueing") == 5


def test_y_is_not_a_vowel():
    assert count_vowels("Yearly yoyo") == 4


def test_long():
    assert count_vowels("moon " * 300) == 600
