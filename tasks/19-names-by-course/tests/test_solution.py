from solution import names_by_course


def test_empty():
    assert names_by_course({}) == {}


def test_one_student():
    assert names_by_course({"Ada": ["logic", "maths"]}) == {"logic": ["Ada"], "maths": ["Ada"]}


def test_names_are_sorted():
    enrolled = {"Zoe": ["chess"], "Kim": ["chess"], "Lou": ["chess"], "Abe": ["chess"]}
    assert names_by_course(enrolled) == {"chess": ["Abe", "Kim", "Lou", "Zoe"]}


def test_several_courses():
    enrolled = {"Tom": ["drama", "music"], "Eva": ["music", "sport"], "Ida": ["sport", "drama"]}
    assert names_by_course(enrolled) == {
        "drama": ["Ida", "Tom"],
        "music": ["Eva", "Tom"],
        "sport": ["Eva", "Ida"],
    }


def test_same_course_twice():
    assert names_by_course({"Pia": ["yoga", "yoga"], "Max": ["yoga"]}) == {"yoga": ["Max", "Pia"]}


def test_student_without_courses():
    assert names_by_course({"Jon": [], "Una": ["golf"]}) == {"golf": ["Una"]}
    assert names_by_course({"Jon": []}) == {}


def test_many():
    enrolled = {f"s{n:03}": ["even" if n % 2 == 0 else "odd"] for n in range(199, -1, -1)}
    assert names_by_course(enrolled) == {
        "even": [f"s{n:03}" for n in range(0, 200, 2)],
        "odd": [f"s{n:03}" for n in range(1, 200, 2)],
    }
