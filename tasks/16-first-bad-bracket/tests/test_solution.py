from solution import first_bad_bracket


def test_nothing_to_match():
    assert first_bad_bracket("") == -1
    assert first_bad_bracket("plain words, no pairs") == -1


def test_balanced():
    assert first_bad_bracket("{[()]}()[]") == -1
    assert first_bad_bracket("if (a[i] > {b}) then") == -1


def test_closing_without_opening():
    assert first_bad_bracket(")") == 0
    assert first_bad_bracket("ok() }") == 5


def test_wrong_kind():
    assert first_bad_bracket("[(])") == 2
    assert first_bad_bracket("{a)}") == 2
    assert first_bad_bracket("({)}") == 2


def test_still_open():
    assert first_bad_bracket("{") == 0
    assert first_bad_bracket("ab[[]") == 2
    assert first_bad_bracket("()x([{}") == 3


def test_wrong_closing_comes_before_still_open():
    assert first_bad_bracket("((]") == 2


def test_deep():
    assert first_bad_bracket("(" * 300 + ")" * 300) == -1
    assert first_bad_bracket("[" * 300 + "]" * 299) == 0
    assert first_bad_bracket("{" * 300 + "}" * 301) == 600
