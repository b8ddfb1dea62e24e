import pytest
from solution import roman_add


@pytest.mark.parametrize(
    ("first", "second", "total"),
    [("I", "I", "II"), ("VI", "I", "VII"), ("LX", "V", "LXV"), ("C", "D", "DC")],
)
def test_signs_side_by_side(first, second, total):
    assert roman_add(first, second) == total


def test_sum_needs_a_subtracted_sign():
    assert roman_add("II", "II") == "IV"
    assert roman_add("V", "IV") == "IX"
    assert roman_add("XX", "XX") == "XL"
    assert roman_add("L", "XL") == "XC"
    assert roman_add("CC", "CC") == "CD"
    assert roman_add("D", "CD") == "CM"


def test_inputs_with_subtracted_signs():
    assert roman_add("IX", "IX") == "XVIII"
    assert roman_add("XLIX", "I") == "L"
    assert roman_add("CMXCIX", "I") == "M"


def test_order_does_not_matter():
    assert roman_add("DCCC", "XXIV") == "DCCCXXIV"
    assert roman_add("XXIV", "DCCC") == "DCCCXXIV"


def test_large():
    assert roman_add("MCMXLIV", "MMXLV") == "MMMCMLXXXIX"
    assert roman_add("MMM", "CMXCIX") == "MMMCMXCIX"
