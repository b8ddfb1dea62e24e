from solution import cheapest_route


def test_neighbours():
    assert cheapest_route(["SE"]) == 0
    assert cheapest_route(["E", "S"]) == 0


def test_straight():
    assert cheapest_route(["E427S"]) == 13
    assert cheapest_route(["S", "0", "0", "E"]) == 0


def test_way_around():
    assert cheapest_route(["S98E", "1##1", "1111"]) == 6
    assert cheapest_route(["2S2", "3#1", "1E9"]) == 6
    assert cheapest_route(["S1151", "91911", "1119E", "19111"]) == 7


def test_breaking_a_wall_is_cheaper():
    assert cheapest_route(["S#E", "999"]) == 10
    assert cheapest_route(["S1#1E", "99999"]) == 12


def test_breaking_a_wall_is_not_worth_it():
    assert cheapest_route(["S#E", "123"]) == 6


def test_only_one_wall():
    assert cheapest_route(["S#1#E"]) == -1
    assert cheapest_route(["S1#", "###", "##E"]) == -1
    assert cheapest_route(["S#1#E", "22299"]) == 17


def test_wall_must_be_saved_for_later():
    assert cheapest_route(["S#1#E", "777##"]) == 32
    assert cheapest_route(["S#0#E", "88###", "#88##", "###0#"]) == -1
    assert cheapest_route(["S#00##E", "999####"]) == -1


def test_large():
    snake = []
    for number in range(10):
        snake.append("1" * 20)
        snake.append("#" * 19 + "1" if number % 2 == 0 else "1" + "#" * 19)
    snake[0] = "S" + "1" * 19
    snake[-1] = "E" + "#" * 19
    assert cheapest_route(snake) == 179
    assert cheapest_route(["S" + "3" * 24] + ["3" * 25] * 23 + ["3" * 24 + "E"]) == 141
