from solution import top_word


def test_no_words():
    assert top_word("") == ""
    assert top_word("  \n ") == ""
    assert top_word("... ! ?") == ""


def test_one_word():
    assert top_word("Hello!") == "hello"


def test_case_is_ignored():
    assert top_word("blue Red rED green RED blue") == "red"


def test_signs_are_removed():
    assert top_word("left; right left: up right, ..right..") == "right"


def test_signs_inside_a_word_stay():
    assert top_word("e.g. eg e.g, eg e.g") == "e.g"


def test_ties_go_to_the_earliest():
    assert top_word("pear fig apple") == "pear"
    assert top_word("one two three two three") == "two"


def test_bare_signs_are_not_words():
    assert top_word("! ! ! sun moon moon") == "moon"


def test_lines_and_long_text():
    assert top_word("sea\nsky\n" * 200 + "sky") == "sky"
