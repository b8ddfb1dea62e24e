from solution import poly_product


def test_numbers():
    assert poly_product("6", "-7") == "-42"
    assert poly_product("-1", "-1") == "1"
    assert poly_product("1", "-1") == "-1"


def test_zero():
    assert poly_product("0", "x^3 + 2") == "0"
    assert poly_product("4x^2 - 4x^2", "x + 1") == "0"
    assert poly_product("0x + 3", "x") == "3x"


def test_factor_one_is_not_written():
    assert poly_product("x^2", "x^3") == "x^5"
    assert poly_product("-x", "x^2 - 4x + 1") == "-x^3 + 4x^2 - x"
    assert poly_product("1", "x") == "x"


def test_two_factors():
    assert poly_product("x + 2", "x + 3") == "x^2 + 5x + 6"
    assert poly_product("2x - 3", "5x + 1") == "10x^2 - 13x - 3"
    assert poly_product("-x - 1", "-x + 2") == "x^2 - x - 2"


def test_terms_cancel():
    assert poly_product("x^2 + 2x + 2", "x^2 - 2x + 2") == "x^4 + 4"
    assert poly_product("x - 1", "x^2 + x + 1") == "x^3 - 1"


def test_order_and_repeated_powers():
    assert poly_product("2 - x + 3x", "x") == "2x^2 + 2x"
    assert poly_product("1 + x^4 - 3x + x^4", "-2") == "-4x^4 + 6x - 2"


def test_large():
    assert poly_product("12x^10 - 5", "x^11 + 10") == "12x^21 - 5x^11 + 120x^10 - 50"
    ones = " + ".join(f"x^{n}" for n in range(60, 1, -1)) + " + x + 1"
    assert poly_product(ones, "x - 1") == "x^61 - 1"
    assert poly_product("1000000x", "-1000000x^2") == "-1000000000000x^3"
