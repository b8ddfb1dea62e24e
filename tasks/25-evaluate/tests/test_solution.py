import pytest
from solution import evaluate


def test_numbers():
    assert evaluate("7") == 7
    assert evaluate("  120 ") == 120


def test_left_to_right():
    assert evaluate("20 - 5 - 3") == 12
    assert evaluate("8 - 2 + 6 - 1") == 11


def test_precedence():
    assert evaluate("2*3+4*5") == 26
    assert evaluate("10 - 2 * 3 | 1 + 1") == 4
    assert evaluate("3 | 2 * 4 | 1 + 6") == 8
    assert evaluate("1 + 9 | 2") == 10


def test_parentheses():
    assert evaluate("(2+3)*(7-(1|4))") == 15
    assert evaluate("((((6))))") == 6
    assert evaluate("2 * (9 | 3) - (4 - 10)") == 24


def test_unary_minus():
    assert evaluate("-5") == -5
    assert evaluate("3*-2") == -6
    assert evaluate("4--1") == 5
    assert evaluate("---2") == -2
    assert evaluate("-(3 - 8) | -2") == 5
    assert evaluate("-7 | -9") == -7


def test_missing_parts():
    for text in ["", "   ", "5 *", "| 3", "2 + * 3", "()", "1 2", "(1)(2)", "3 (4)", "-"]:
        with pytest.raises(ValueError):
            evaluate(text)


def test_parentheses_and_characters_that_do_not_belong():
    for text in ["(1", "1)", ")1(", "((2)", "2 + x", "6 / 2", "1.5", "2 ** 3", "4 & 1"]:
        with pytest.raises(ValueError):
            evaluate(text)


def test_long():
    assert evaluate(" + ".join(["1"] * 400)) == 400
    assert evaluate("(" * 30 + "9" + " - 1)" * 30) == -21
    assert evaluate("99999999999 * 99999999999") == 9999999999800000000001
