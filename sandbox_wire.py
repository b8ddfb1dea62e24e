"""The wire between judge and solution process: what crosses, and how. Not launched by hand.

A frame is 4 bytes of length (little-endian) and JSON. None, bool, int, float and str stand for themselves,
every other value is a tagged list. What can change in place (a list, a dict, an array) is ["ref", number]: its content
travels in the frame's "heap", and both sides keep the object under that number, so a change made by either side
reaches the other with the next frame, and aliases stay aliases. The judge drops a number when nothing in the tests
holds the object any more. An exception of a built-in class is its names and its arguments. Nothing is pickled; what is
built are exact built-in values and those of sandbox_values.py. All else (classes, instances, generators,
callables, exceptions of an own class) is what sandbox_handles.py makes of it, and Unplain where it cannot.
"""
import builtins
import collections
import itertools
import json
import operator
import os
import re
import socket
import struct
import sys
import traceback

from sandbox_values import array_content, build_array, is_array, put_together, take_apart

MAX_FRAME = 16 << 20  # bytes, in both directions
MAX_DEPTH = 100  # of tuples and frozensets in each other; lists, dicts and sets lie flat in the heap


class Unplain(Exception):
    """A value that cannot cross; the message names its type."""


class Broken(Exception):
    """The other side sent something that is no message."""


def send_frame(sock: socket.socket, data: bytes) -> None:
    sock.sendall(struct.pack("<I", len(data)) + data)


def recv_frame(sock: socket.socket, limit: int) -> bytes:
    """The next frame. EOFError at the end of the stream, Broken above `limit` bytes."""
    head = recv_exactly(sock, 4)
    size = struct.unpack("<I", head)[0]
    if size > limit:
        raise Broken(f"a message of {size} bytes")
    return recv_exactly(sock, size)


def recv_exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = sock.recv(min(size - len(data), 1 << 20))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


def content(obj: object) -> tuple:
    """The items of a mutable container in order; a dict's keys and values in turn; an array in one piece."""
    kind = type(obj)
    if kind in (list, set):
        return tuple(obj)
    if kind is dict:
        return tuple(itertools.chain.from_iterable(obj.items()))
    if kind is bytearray:
        return (bytes(obj),)
    if kind is collections.deque:
        return (obj.maxlen, *obj)
    if kind is collections.defaultdict:
        return (obj.default_factory, *itertools.chain.from_iterable(obj.items()))
    if is_array(obj):
        return array_content(obj)
    return tuple(itertools.chain.from_iterable(obj.items()))


def unchanged(before: tuple | None, items: tuple, kind: type) -> bool:
    """By identity for containers: 1, 1.0 and True are equal and not the same."""
    if before is None or len(before) != len(items):
        return False
    return all(map(operator.is_, before, items)) if kind in MUTABLE_KINDS and kind is not bytearray \
        else before == items


def empty(kind: str, items: list) -> object:
    """A container of this kind without its content; an array with it."""
    if kind == "ndarray":
        return build_array(*items)
    return MUTABLE[kind](maxlen=items[0]) if kind == "deque" else MUTABLE[kind]()


def holders(objects: dict[int, object]) -> dict[int, int]:
    return {number: sys.getrefcount(obj) for number, obj in objects.items()}


UNHELD = holders({0: []})[0]  # what an object counts that nothing but the table holds
MUTABLE = {kind.__name__: kind for kind in (list, dict, set, bytearray, collections.deque, collections.defaultdict,
                                            collections.OrderedDict, collections.Counter)}
MUTABLE_KINDS = set(MUTABLE.values())


class Wire:
    """One end of the socket between judge (parity 0) and solution (parity 1); each side gives its objects
    numbers of its parity."""

    def __init__(self, sock: socket.socket, parity: int):
        self.sock, self.parity, self.next_number = sock, parity, parity
        self.objects: dict[int, object] = {}
        self.numbers: dict[int, int] = {}  # id(object) -> number
        self.synced: dict[int, tuple] = {}  # number -> content at the last frame
        self.dropped: list[int] = []  # numbers that the other side may forget, and has not heard of
        self.handles = None  # sandbox_handles.Handles, where there are any
        self.decoding = 0  # messages half read: the hash of a proxy may ask in the midst of one

    def send(self, message: dict, value: object = None, changes: bool = True) -> None:
        """Send a message with one value and, unless it is to be a bare word, every known object that changed
        since the last frame. Unplain, with nothing sent, when one of them cannot cross."""
        send_frame(self.sock, self.pack(message, value, changes))

    def pack(self, message: dict, value: object, changes: bool = True) -> bytes:
        changes = changes and not self.decoding
        if self.parity == 0 and not self.decoding:
            self.dropped += self._drop_unheld()
        first_new, first_handle = len(self.objects), self.handles and self.handles.next_number
        synced, heap = {}, []
        try:
            body = self._encode(value)
            pending = list(self.objects) if changes else []
            for number in pending:
                obj, before = self.objects[number], self.synced.get(number)
                items = content(obj)
                if unchanged(before, items, type(obj)):
                    continue
                known = len(self.objects)
                heap.append([number, type(obj).__name__, [self._encode(item) for item in items]])
                pending.extend(itertools.islice(self.objects, known, None))
                synced[number] = items
            message = message | {"value": body, "heap": heap, "drop": self.dropped}
            if self.handles:
                message |= self.handles.news()
            frame = json.dumps(message).encode()
            if len(frame) > MAX_FRAME:
                raise Unplain(f"value of {len(frame)} bytes")
        except BaseException:
            for number in list(self.objects)[first_new:]:
                self._drop(number)
            if self.handles:
                self.handles.undo(first_handle)
            raise
        self.synced.update(synced)
        self.dropped = []
        if self.handles:
            self.handles.sent()
        return frame

    def recv(self) -> tuple[dict, object]:
        """The next message and its value. EOFError when the other side is gone, Broken on nonsense."""
        frame = recv_frame(self.sock, MAX_FRAME)
        self.decoding += 1
        try:
            message = json.loads(frame)
            for number in message["drop"]:
                self._drop(number)
            if self.handles:
                self.handles.hear(message)
            for number, kind, items in message["heap"]:
                if number not in self.objects:
                    if type(number) is not int or number % 2 == self.parity:
                        raise Broken("a foreign object number")
                    flat = [self._decode(item) for item in items] if kind == "ndarray" else \
                        [self._decode(item) for item in items[:1]] if kind == "deque" else []
                    self._keep(number, empty(kind, flat))
                elif type(self.objects[number]).__name__ != kind:
                    raise Broken("an object that changed its type")
            for number, _, items in message["heap"]:
                self._fill(self.objects[number], [self._decode(item) for item in items])
                self.synced[number] = content(self.objects[number])
            return message, self._decode(message["value"])
        except (ArithmeticError, AttributeError, ImportError, LookupError, MemoryError, RecursionError, TypeError,
                ValueError, re.error) as exc:
            raise Broken(f"a malformed message ({type(exc).__name__})") from None
        finally:
            self.decoding -= 1

    def _keep(self, number: int, obj: object) -> None:
        self.objects[number] = obj
        self.numbers[id(obj)] = number

    def _drop_unheld(self) -> list[int]:
        drop = [number for number, count in holders(self.objects).items() if count <= UNHELD  # and no news of it
                and unchanged(self.synced.get(number), content(obj := self.objects[number]), type(obj))]
        for number in drop:
            self._drop(number)
        return drop

    def _drop(self, number: int) -> None:
        del self.numbers[id(self.objects.pop(number))]
        self.synced.pop(number, None)

    def _fill(self, obj: object, items: list) -> None:
        kind = type(obj)
        if kind is list:
            obj[:] = items
        elif kind is bytearray:
            obj[:] = items[0]
        elif is_array(obj):
            obj[...] = build_array(*items)
        elif kind in (set, collections.deque):
            obj.clear()
            obj.extend(items[1:]) if kind is collections.deque else obj.update(items)
        else:
            if kind is collections.defaultdict:
                obj.default_factory, *items = items
            obj.clear()
            obj.update(dict(zip(items[::2], items[1::2], strict=True)))

    def _encode(self, value: object, depth: int = 0) -> object:
        kind = type(value)
        if value is None or kind in (bool, float):
            return value
        if kind is int:
            return value if -(1 << 63) <= value < 1 << 63 else ["int", hex(value)]  # json caps decimal digits
        if kind is str:
            try:
                value.encode()
                return value
            except UnicodeEncodeError:  # json would join two lone surrogates into one character
                return ["str", value.encode("utf-8", "surrogatepass").hex()]
        if kind in MUTABLE_KINDS or is_array(value):
            if id(value) not in self.numbers:
                self._keep(self.next_number, value)
                self.next_number += 2
            return ["ref", self.numbers[id(value)]]
        if kind in (tuple, frozenset):
            if depth == MAX_DEPTH:
                raise Unplain(f"{kind.__name__} nested more than {MAX_DEPTH} deep")
            return [kind.__name__, *[self._encode(item, depth + 1) for item in value]]
        if kind is bytes:
            return ["bytes", value.hex()]
        if kind is complex:
            return ["complex", value.real, value.imag]
        if kind is range:
            return ["range", *[self._encode(n) for n in (value.start, value.stop, value.step)]]
        if value is Ellipsis:
            return ["ellipsis"]
        if depth == MAX_DEPTH:
            raise Unplain(f"{kind.__name__} nested more than {MAX_DEPTH} deep")
        try:
            whole = take_apart(value)
        except ValueError as exc:
            raise Unplain(str(exc)) from None
        if whole:
            return [whole[0], *[self._encode(part, depth + 1) for part in whole[1]]]
        if self.handles:
            return self.handles.encode(value, depth)
        raise Unplain(type_name(value))

    def _decode(self, data: object, depth: int = 0) -> object:
        if type(data) is not list:
            if type(data) is dict:
                raise Broken("an untagged object")
            return data
        if depth > MAX_DEPTH:
            raise Broken("a value nested too deep")
        tag, *parts = data
        if tag == "ref":
            return self.objects[parts[0]]
        if tag in ("tuple", "frozenset"):
            items = [self._decode(part, depth + 1) for part in parts]
            return tuple(items) if tag == "tuple" else frozenset(items)
        if tag == "int":
            return int(parts[0], 16)
        if tag == "str":
            return bytes.fromhex(parts[0]).decode("utf-8", "surrogatepass")
        if tag == "bytes":
            return bytes.fromhex(parts[0])
        if tag == "complex":
            return complex(float(parts[0]), float(parts[1]))
        if tag == "range":
            return range(*[self._decode(part) for part in parts])
        if tag == "ellipsis":
            return ...
        if self.handles and tag in self.handles.TAGS:
            return self.handles.decode(tag, parts, depth)
        return put_together(tag, [self._decode(part, depth + 1) for part in parts])


def type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def describe(exc: BaseException, folder: str) -> tuple[dict, BaseException]:
    """An exception as a reply: the place in `folder` where it was raised; itself without what it holds."""
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(exc.__traceback__)]
    lines = [f"{os.path.relpath(file, folder)}:{line}" for file, line in places if file.startswith(folder)]
    exc.__traceback__ = exc.__context__ = exc.__cause__ = None  # frees what the frames hold, memory above all
    return {"raise": lines[-1] if lines else ""}, exc


def rebuild(names: list[str], arguments: list) -> BaseException:
    """The nearest built-in exception class that takes these arguments."""
    for name in names:
        kind = vars(builtins).get(name)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            try:
                return kind(*arguments)
            except Exception:  # noqa: BLE001, S112, not one that these arguments build
                continue
    return Exception(*arguments)


def write_files(folder: str, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
