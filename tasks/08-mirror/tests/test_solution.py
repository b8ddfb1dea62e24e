from solution import mirror


def test_empty():
    assert mirror("") == ""


def test_one_letter():
    assert mirror("q") == "qq"


def test_word():
    assert mirror("stone") == "stoneenots"


def test_palindrome():
    assert mirror("level") == "levellevel"


def test_spaces_and_case():
    assert mirror("A bc ") == "A bc  cb A"


def test_long():
    assert mirror("01" * 200) == "01" * 200 + "10" * 200
