from solution import typo_cost


def test_same_word():
    assert typo_cost("", "") == 0
    assert typo_cost("planet", "planet") == 0


def test_one_word_is_empty():
    assert typo_cost("", "ball") == 7
    assert typo_cost("book", "") == 7
    assert typo_cost("", "a") == 2


def test_replace():
    assert typo_cost("big", "beg") == 1
    assert typo_cost("bag", "bat") == 3
    assert typo_cost("bag", "bsg") == 3
    assert typo_cost("sit", "got") == 4


def test_drop_and_add():
    assert typo_cost("stone", "tone") == 2
    assert typo_cost("lamp", "lamps") == 2
    assert typo_cost("ab", "ba") == 4


def test_double_letters():
    assert typo_cost("letter", "leter") == 1
    assert typo_cost("cofee", "coffee") == 1
    assert typo_cost("zzzz", "z") == 3
    assert typo_cost("acb", "accccb") == 3


def test_mixed():
    assert typo_cost("tomorow", "tomorrow") == 1
    assert typo_cost("adress", "addrese") == 4
    assert typo_cost("kitten", "sitting") == 6
    assert typo_cost("queue", "cue") == 7


def test_long():
    assert typo_cost("a" * 90, "e" * 90) == 90
    assert typo_cost("ab" * 45, "ba" * 45) == 4
    assert typo_cost("x" * 80, "yx" * 40) == 120
