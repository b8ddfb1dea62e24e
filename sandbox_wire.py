"""The wire between judge and solution process: what crosses, and how. Not launched by hand.

A frame is 4 bytes of length (little-endian) and JSON. None, bool, int, float and str stand for themselves,
every other value is a tagged list. A list, dict or set is ["ref", number]: its content travels in the frame's
"heap", and both sides keep the object under that number, so a change made by either side reaches the other
with the next frame, and aliases stay aliases. The judge drops a number when nothing in the tests holds the
object any more. An exception is the names of its built-in base classes and its arguments. Nothing is pickled,
and nothing but exact built-in values is ever built.

Left out: classes, instances, generators and callables as values. Unplain names the type of such a value.
"""
import builtins
import itertools
import json
import operator
import os
import socket
import struct
import sys
import traceback

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


def content(obj: list | dict | set) -> tuple:
    """The items of a mutable container in order; a dict's keys and values in turn."""
    return tuple(itertools.chain.from_iterable(obj.items()) if type(obj) is dict else obj)


def holders(objects: dict[int, object]) -> dict[int, int]:
    return {number: sys.getrefcount(obj) for number, obj in objects.items()}


UNHELD = holders({0: []})[0]  # what an object counts that nothing but the table holds
MUTABLE = {"list": list, "dict": dict, "set": set}


class Wire:
    """One end of the socket between judge (parity 0) and solution (parity 1); each side gives its objects
    numbers of its parity."""

    def __init__(self, sock: socket.socket, parity: int):
        self.sock, self.parity, self.next_number = sock, parity, parity
        self.objects: dict[int, list | dict | set] = {}
        self.numbers: dict[int, int] = {}  # id(object) -> number
        self.synced: dict[int, tuple] = {}  # number -> content at the last frame
        self.dropped: list[int] = []  # numbers that the other side may forget, and has not heard of

    def send(self, message: dict, value: object = None, changes: bool = True) -> None:
        """Send a message with one value and, unless it is to be a bare word, every known object that changed
        since the last frame. Unplain, with nothing sent, when one of them cannot cross."""
        send_frame(self.sock, self.pack(message, value, changes))

    def pack(self, message: dict, value: object, changes: bool = True) -> bytes:
        if self.parity == 0:
            self.dropped += self._drop_unheld()
        first_new = len(self.objects)
        synced, heap = {}, []
        try:
            body = self._encode(value)
            pending = list(self.objects) if changes else []
            for number in pending:
                obj, before = self.objects[number], self.synced.get(number)
                items = content(obj)
                # by identity: 1, 1.0 and True are equal and not the same
                if before is not None and len(before) == len(items) and all(map(operator.is_, before, items)):
                    continue
                known = len(self.objects)
                heap.append([number, type(obj).__name__, [self._encode(item) for item in items]])
                pending.extend(itertools.islice(self.objects, known, None))
                synced[number] = items
            frame = json.dumps(message | {"value": body, "heap": heap, "drop": self.dropped}).encode()
            if len(frame) > MAX_FRAME:
                raise Unplain(f"value of {len(frame)} bytes")
        except BaseException:
            for number in list(self.objects)[first_new:]:
                self._drop(number)
            raise
        self.synced.update(synced)
        self.dropped = []
        return frame

    def recv(self) -> tuple[dict, object]:
        """The next message and its value. EOFError when the other side is gone, Broken on nonsense."""
        frame = recv_frame(self.sock, MAX_FRAME)
        try:
            message = json.loads(frame)
            for number in message["drop"]:
                self._drop(number)
            for number, kind, _ in message["heap"]:
                if number not in self.objects:
                    if type(number) is not int or number % 2 == self.parity:
                        raise Broken("a foreign object number")
                    self._keep(number, MUTABLE[kind]())
                elif type(self.objects[number]) is not MUTABLE[kind]:
                    raise Broken("an object that changed its type")
            for number, _, items in message["heap"]:
                self._fill(self.objects[number], [self._decode(item) for item in items])
                self.synced[number] = content(self.objects[number])
            return message, self._decode(message["value"])
        except (ArithmeticError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as exc:
            raise Broken(f"a malformed message ({type(exc).__name__})") from None

    def _keep(self, number: int, obj: list | dict | set) -> None:
        self.objects[number] = obj
        self.numbers[id(obj)] = number

    def _drop_unheld(self) -> list[int]:
        drop = [number for number, count in holders(self.objects).items() if count <= UNHELD]
        for number in drop:
            self._drop(number)
        return drop

    def _drop(self, number: int) -> None:
        del self.numbers[id(self.objects.pop(number))]
        self.synced.pop(number, None)

    def _fill(self, obj: list | dict | set, items: list) -> None:
        if type(obj) is list:
            obj[:] = items
            return
        obj.clear()
        obj.update(items if type(obj) is set else zip(items[::2], items[1::2], strict=True))

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
        if kind in (list, dict, set):
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
        raise Unplain(f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."))

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
        raise Broken("an unknown tag")


def crosses(value: object) -> bool:
    """Whether a value can be sent."""
    try:
        Wire(None, parity=1).pack({}, value)
    except Unplain:
        return False
    return True


def describe(exc: BaseException, folder: str) -> tuple[dict, list]:
    """An exception as a reply: the built-in names of its MRO and the place in the solution; its arguments."""
    names = [c.__name__ for c in type(exc).__mro__[:-1] if vars(builtins).get(c.__name__) is c]
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(exc.__traceback__)]
    lines = [f"{os.path.relpath(file, folder)}:{line}" for file, line in places if file.startswith(folder)]
    exc.__traceback__ = exc.__context__ = exc.__cause__ = None  # frees what the frames hold, memory above all
    arguments = []
    for argument in exc.args:
        try:
            arguments.append(argument if crosses(argument) else str(argument))
        except BaseException:  # noqa: BLE001, its __str__ is the solution's
            arguments.append("unprintable")
    return {"raise": names, "where": lines[-1] if lines else ""}, arguments


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
