from solution import shout


def test_word():
    assert shout("stop") == "STOP!"


def test_mixed_case():
    assert shout("wAiT fOr Me") == "WAIT FOR ME!"


def test_already_upper():
    assert shout("NOW") == "NOW!"


def test_empty():
    assert shout("") == "!"


def test_already_a_shout():
    assert shout("oh!") == "OH!!"


def test_digits_and_signs_stay():
    assert shout("room 7, left") == "ROOM 7, LEFT!"
