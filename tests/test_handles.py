"""Handles: what solutions define and tests hand over, and attacks on the way in which both cross."""
import pytest
from test_sandbox import task

import sandbox

REFERENCE = """
import contextlib, dataclasses, enum, functools
class Err(ValueError):
    def __init__(self, code):
        super().__init__(f"code {code}"); self.code = code
class Stack:
    'A stack.'
    size = 7
    def __init__(self, items=()): self.items = list(items)
    def push(self, x): self.items.append(x)
    def pop(self):
        if not self.items: raise Err(3)
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __eq__(self, o): return isinstance(o, Stack) and o.items == self.items or o == self.items
    def __hash__(self): return hash(tuple(self.items))
    def __repr__(self): return f"Stack({self.items})"
    def __contains__(self, x): return x in self.items
    def __getitem__(self, i): return self.items[i]
    def __add__(self, o): return Stack(self.items + list(o))
    @property
    def top(self): return self.items[-1]
    @classmethod
    def of(cls, *a): return cls(a)
    @staticmethod
    def two(): return 2
@dataclasses.dataclass(order=True)
class P:
    x: int
    y: int = 0
class Color(enum.Enum):
    RED = 1
    BLUE = 2
def gen(n):
    for i in range(n):
        yield i
def apply(f, xs): return [f(x) for x in xs]
def adder(n):
    def add(x): return x + n
    return add
@contextlib.contextmanager
def ctx(log):
    log.append("in")
    try: yield 5
    finally: log.append("out")
@functools.lru_cache
def fib(n): return n if n < 2 else fib(n-1) + fib(n-2)
def memo(f):
    cache = {}
    @functools.wraps(f)
    def w(*a):
        if a not in cache: cache[a] = f(*a)
        return cache[a]
    w.cache = cache
    return w
def names(people): return sorted(p.name for p in people)
def sort_by(xs, key): xs.sort(key=key)
def helper(): return 1
def uses_helper(): return helper() + 1
"""
TESTS = """
import copy, types, collections.abc, inspect
import pytest
import solution
from solution import *
def test_stack():
    s = Stack()
    s.push(1); s.push(2)
    assert len(s) == 2 and list(s) == [1, 2] and s == Stack([1, 2]) and s != Stack()
    assert s == [1, 2]
    assert isinstance(s, Stack) and type(s) is Stack and not isinstance(s, list)
    assert repr(s) == "Stack([1, 2])" and str(s) == "Stack([1, 2])"
    assert {s: 1}[Stack([1, 2])] == 1 and 2 in s and s[0] == 1 and s.top == 2
    assert Stack.of(1, 2) == s and Stack.two() == 2 and Stack.size == 7 and Stack.__name__ == "Stack"
    assert list(s + [3]) == [1, 2, 3] and s.items == [1, 2] and hasattr(s, "push") and not hasattr(s, "x")
    s.items.append(9)
    assert s.pop() == 9
    s.name = "n"; assert s.name == "n"
    assert copy.copy(s) == s and Stack.__doc__ == "A stack."
def test_err():
    with pytest.raises(Err, match="code 3") as e:
        Stack().pop()
    assert e.value.code == 3 and isinstance(e.value, ValueError) and str(e.value) == "code 3"
    with pytest.raises(ValueError): Stack().pop()
    assert issubclass(Err, ValueError)
    try: raise Err(4)
    except Err as exc: assert exc.code == 4
def test_data():
    assert P(1, 2) == P(1, 2) and P(1) < P(2) and sorted([P(3), P(1)])[0].x == 1
    assert repr(P(1)) == "P(x=1, y=0)" and P(1).x == 1 and P(x=1).y == 0
    with pytest.raises(TypeError): hash(P(1))
def test_enum():
    assert Color.RED is Color.RED and Color.RED != Color.BLUE and Color.RED.value == 1 and Color(2) is Color.BLUE
    assert [c.name for c in Color] == ["RED", "BLUE"] and Color["RED"] is Color.RED and len(Color) == 2
    assert isinstance(Color.RED, Color)
def test_gen():
    g = gen(3)
    assert next(g) == 0 and list(g) == [1, 2] and isinstance(gen(1), types.GeneratorType)
    assert isinstance(gen(1), collections.abc.Iterator)
    with pytest.raises(StopIteration): next(g)
def test_call():
    assert apply(lambda x: x * 2, [1, 2]) == [2, 4] and adder(2)(3) == 5 and callable(adder(1))
    assert apply(str, [1]) == ["1"] and apply(len, ["ab"]) == [2]
    def bad(x): raise KeyError(x)
    with pytest.raises(KeyError): apply(bad, [1])
    class Own(Exception): pass
    def own(x): raise Own(x)
    with pytest.raises(Own) as e: apply(own, [1])
    assert type(e.value) is Own
    seen = []
    apply(seen.append, [1, 2]); assert seen == [1, 2]
def test_ctx():
    log = []
    with ctx(log) as x: assert x == 5 and log == ["in"]
    assert log == ["in", "out"]
    with pytest.raises(KeyError):
        with ctx(log): raise KeyError("k")
    assert log == ["in", "out"] * 2
def test_fib():
    assert fib(20) == 6765 and fib.cache_info().hits > 0
    fib.cache_clear()
    assert fib.__name__ == "fib"
def test_memo():
    calls = []
    @memo
    def sq(x):
        "doc"
        calls.append(x); return x * x
    assert sq(2) == 4 and sq(2) == 4 and calls == [2] and sq.__name__ == "sq" and sq.__doc__ == "doc"
    assert sq.cache == {(2,): 4}
class Person:
    def __init__(self, name): self.name = name; self._secret = 1
    def __lt__(self, o): return self.name < o.name
    def hello(self): return "hi"
def test_people():
    assert names([Person("b"), Person("a")]) == ["a", "b"]
    ps = [Person("b"), Person("a")]
    sort_by(ps, key=lambda p: p.name)
    assert [p.name for p in ps] == ["a", "b"]
    xs = [3, 1]; sort_by(xs, None); assert xs == [1, 3]
    ps.reverse(); sort_by(ps, None); assert [p.name for p in ps] == ["a", "b"]
"""


@pytest.fixture(scope="module")
def box():
    with sandbox.Sandbox(workers=1, timeout_s=4.0, memory_mb=256) as made:
        yield made


def test_objects_of_both_sides(box):
    verdict = box.grade(task("objects", TESTS, REFERENCE), {"solution.py": REFERENCE})
    assert verdict.outcome == "passed", verdict.output


POP = "from solution import S\ndef test_pop():\n    s = S()\n    s.push(3)\n    assert s.pop() == 3\n"
CLOSE = POP.replace("s.pop() == 3", "abs(s.pop() - 3) < 1e-6")
TEXT = POP.replace("push(3)", "push('ab')").replace("s.pop() == 3", "s.pop().startswith('a')")
CALL = "from solution import S\ndef test_call():\n    assert S().run(lambda: 7) == 7\n"
RIGHT = """
class S:
    def push(self, x): self.x = x
    def pop(self): return self.x
    def run(self, f): return f()
"""
LIAR = """
class S:
    def push(self, x): pass
    def pop(self): return %s
    run = lambda self, f: %s
    def __eq__(self, o): return True
    def __sub__(self, o): return 0
    __rsub__ = __sub__
    def startswith(self, p): return True
class T(S, float): pass
"""


@pytest.mark.parametrize("answer", ["S()", "self", "T()", "[S()][0]", "type('X', (S, int), {})()", "S"])
@pytest.mark.parametrize("tests", [POP, CLOSE, TEXT])
def test_an_object_is_no_plain_value(box, tests, answer):
    assert box.grade(task(tests, tests, RIGHT), {"solution.py": RIGHT}).outcome == "passed"
    verdict = box.grade(task(tests, tests, RIGHT), {"solution.py": LIAR % (answer, "0")})
    assert (verdict.outcome, verdict.reward) == ("failed", 0.0), verdict


@pytest.mark.parametrize("tests", [POP, CLOSE])
def test_an_object_is_no_plain_value_without_a_reference_either(box, tests):
    verdict = box.grade(task("bare" + tests, tests), {"solution.py": LIAR % ("S()", "0")})
    assert (verdict.outcome, verdict.reward) == ("failed", 0.0), verdict


@pytest.mark.parametrize("name", ["__globals__", "__code__", "__self__", "__closure__", "__class__.__mro__",
                                  "__builtins__", "gi_frame", "f_back"])
def test_callbacks_show_no_insides(box, name):
    spy = RIGHT + f"""
class S:
    def run(self, f):
        judge = f.__closure__[0].cell_contents.peer if f.__closure__ else None
        return judge.operate("get", {name!r}, f) and 7
"""
    verdict = box.grade(task(CALL, CALL, RIGHT), {"solution.py": spy})
    assert verdict.outcome == "failed" and "AttributeError" in verdict.output, verdict
