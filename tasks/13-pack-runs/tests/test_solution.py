from solution import pack_runs


def test_empty():
    assert pack_runs("") == ""


def test_one_character():
    assert pack_runs("k") == "k"


def test_one_long_run():
    assert pack_runs("z" * 12) == "z12"


def test_run_at_each_end():
    assert pack_runs("mmmmnop") == "m4nop"
    assert pack_runs("nopqq") == "nopq2"


def test_same_character_twice_apart():
    assert pack_runs("aabaa") == "a2ba2"


def test_case_matters():
    assert pack_runs("aAAa") == "aA2a"


def test_spaces_and_signs():
    assert pack_runs("go  on...") == "go 2on.3"


def test_long():
    assert pack_runs("ab" * 50 + "c" * 100) == "ab" * 50 + "c100"
