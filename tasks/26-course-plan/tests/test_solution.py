from solution import course_plan


def test_no_courses():
    assert course_plan({}, 4) == []


def test_one_term():
    assert course_plan({"music": []}, 1) == [["music"]]
    assert course_plan({"d": [], "b": [], "c": [], "a": []}, 9) == [["a", "b", "c", "d"]]


def test_limit_splits_terms():
    assert course_plan({"e": [], "d": [], "c": [], "b": [], "a": []}, 2) == [["a", "b"], ["c", "d"], ["e"]]


def test_courses_named_only_as_needs():
    assert course_plan({"robots": ["sensors", "motors"]}, 5) == [["motors", "sensors"], ["robots"]]


def test_needs_must_be_in_an_earlier_term():
    needs = {"a": ["b"], "b": ["c"], "c": [], "z": []}
    assert course_plan(needs, 10) == [["c", "z"], ["b"], ["a"]]


def test_waiting_courses_compete_with_newly_ready_ones():
    needs = {"a": ["k"], "k": [], "m": [], "p": [], "b": ["k", "m"]}
    assert course_plan(needs, 1) == [["k"], ["a"], ["m"], ["b"], ["p"]]
    assert course_plan(needs, 2) == [["k", "m"], ["a", "b"], ["p"]]


def test_impossible():
    assert course_plan({"a": ["a"]}, 2) is None
    assert course_plan({"a": [], "b": ["d"], "c": ["b", "a"], "d": ["c"]}, 2) is None
    assert course_plan({"x": ["y"], "y": ["z"], "z": ["y"], "w": []}, 1) is None


def test_long_chain():
    needs = {f"c{n:03}": [f"c{n + 1:03}"] for n in range(150)}
    assert course_plan(needs, 3) == [[f"c{n:03}"] for n in range(150, -1, -1)]
