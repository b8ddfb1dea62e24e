"""How far a proxy of the solution is believed. Not launched by hand.

The reference's run records, for each test and each request of it (by kind and count), where in the answer an object
of its own stood. In a solution's run such an object is
  FULL    where the reference had one at the same place of the same answer: it may equal, order with and calculate
          with plain values, by its own word;
  LOOSE   where nothing is known (no reference, an argument of a callback): all but that;
  STRICT  where the reference had a plain value: it can be iterated and turned into a number, a truth value or text,
          and equals nothing. What it is asked for would tell it what the test expects.
An object met at several places is believed as in the least of them; a bare answer is set apart instead, so that a
method which returns `self` and not None does its object no harm. Two objects of the solution compare by its word.
"""
import collections

from sandbox_handles import BINARY, COMPARE, UNARY, Handles, Ref, RemoteObject, RemoteType, new_object

STRICT, LOOSE, FULL = range(3)
STOPS = "StopIteration"  # stands among the places of a request
UNCOUNTED = {*COMPARE, "__hash__", "__len__", "__bool__", "__str__", "__repr__", "__format__", "__contains__"}
MAPPINGS = (dict, collections.defaultdict, collections.OrderedDict, collections.Counter)


class Trust:
    """`plan`: what an earlier Trust recorded of the reference; "record" to do that; None without a reference."""

    def __init__(self, handles: Handles, plan: dict | str | None):
        self.handles, self.plan, self.test = handles, plan, ""
        self.record: dict[str, dict[str, list[str]]] = {}  # test -> "request number" -> places
        self.counts: collections.Counter = collections.Counter()

    def refuses(self, op: str, name: str, target: object, args: tuple) -> object:
        """NotImplemented, or why the operation may not be asked of the solution, or nothing."""
        ref = self.handles.addresses.get(id(target))
        if ref is None:
            return None
        trust = LOOSE if ref.trust is None else ref.trust
        if op == "special" and name in BINARY and isinstance(target, RemoteObject):
            other = self.handles.addresses.get(id(args[0])) if args else None
            if trust == STRICT or trust == LOOSE and other is None or other is not None and other.trust == STRICT:
                return NotImplemented
        if trust == STRICT and not (op == "special" and name in UNARY):
            return f"the solution returned an object of type {type(target).__name__} where the reference did not"
        return None

    def count(self, key: str) -> int:
        self.counts[self.test, key] += 1
        return self.counts[self.test, key]

    def lower(self) -> None:
        """What arrived is an argument of a callback."""
        for proxy in self._arrived():
            self._limit(proxy, LOOSE)

    def receive(self, key: str, answer: object, request: object, outermost: bool) -> object:
        """What arrived came with an answer. Returns the answer, a twin in its place if it is not what was due."""
        arrived = self._arrived()
        if not outermost or self.plan is None or key.removeprefix("special ") in UNCOUNTED:
            for proxy in arrived:
                self._limit(proxy, LOOSE)
            return answer
        key = f"{key} {self.count(key)}"
        found = places((answer, request), {id(proxy): proxy for proxy in arrived})
        recording = self.plan == "record"
        due = set() if recording else set(self.plan.get(self.test, {}).get(key, ()))
        if recording and found:
            self.record.setdefault(self.test, {})[key] = sorted({place for place, _ in found})
        for place, proxy in found:
            least = LOOSE if request[0] is None and "__call__" in dir(type(proxy)) else STRICT
            apart = place == "/0" and least == STRICT and isinstance(proxy, RemoteObject)
            if apart and not recording and place not in due:
                answer = self._twin(proxy)
            else:
                self._limit(proxy, FULL if recording or place in due else least)
        reached = {id(proxy) for _, proxy in found}
        for proxy in arrived:
            if id(proxy) not in reached:
                self._limit(proxy, LOOSE)
        return answer

    def stops(self, key: str) -> bool:
        """Whether this request, counted already, may raise StopIteration: as the reference did, or it is recorded."""
        key = f"{key} {self.counts[self.test, key]}"
        if self.plan == "record":
            self.record.setdefault(self.test, {}).setdefault(key, []).append(STOPS)
            return True
        return self.plan is not None and STOPS in self.plan.get(self.test, {}).get(key, ())

    def _arrived(self) -> list[object]:
        arrived, self.handles.arrived = self.handles.arrived, []
        return arrived

    def _limit(self, proxy: object, trust: int) -> None:
        ref = self.handles.addresses.get(id(proxy))
        if ref is not None:
            ref.trust = trust if ref.trust is None else min(ref.trust, trust)

    def _twin(self, proxy: RemoteObject) -> RemoteObject:
        arguments = proxy.args if isinstance(proxy, BaseException) else ()
        twin = new_object(type(proxy), list(arguments))
        object.__setattr__(twin, "_original", proxy)  # or its number would be given back
        ref = Ref(twin, self.handles._gone)
        ref.number, ref.address, ref.trust = self.handles.addresses[id(proxy)].number, id(twin), STRICT
        self.handles.addresses[id(twin)] = ref
        return twin


def places(root: tuple, proxies: dict[int, object]) -> list[tuple[str, object]]:
    """(place, proxy) of every proxy in a value; a place is the way there by index or key, "*" where unordered."""
    found, seen, waiting = [], set(), [("", root)]
    while waiting:
        place, value = waiting.pop()
        kind = type(value)
        if id(value) in proxies:
            found.append((place, value))
        elif kind is RemoteType or id(value) in seen:
            continue
        elif kind in (tuple, list, collections.deque):
            seen.add(id(value))
            waiting += [(f"{place}/{index}", item) for index, item in enumerate(value)]
        elif kind in (set, frozenset):
            seen.add(id(value))
            waiting += [(f"{place}/*", item) for item in value]
        elif kind in MAPPINGS:
            seen.add(id(value))
            for key, item in value.items():
                waiting.append((f"{place}/*key", key))
                waiting.append((f"{place}/{key!r}" if type(key) in (str, int) else f"{place}/*", item))
    return found
