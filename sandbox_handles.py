"""Handles: what stands on one side of the wire for an object that lives on the other. Not launched by hand.

An object that is no plain value stays where it is and gets a number; the other side sees a proxy, and every
operation on the proxy is a request. A class is described once (name, bases, special methods that it defines) and
rebuilt as a class of proxies, so isinstance and `except` work there without asking; its bases are proxies' classes
too, or exceptions of the standard library, never int, str or list. A reply may be preceded by requests of the
other side (a callback): whoever waits for a reply answers them.

What the judge believes of a proxy is for sandbox_judge.py to say (Peer.operate), what the tests' objects offer for
sandbox_offers.py. Left out: classes of one side that inherit from classes of the other; pickling; awaiting.
"""
import builtins
import sys
import threading
import weakref

from sandbox_values import CLASS_NAMES, CLASSES
from sandbox_wire import Broken, Unplain, Wire, describe, rebuild, type_name

MAX_HANDLES = 100_000  # alive at once, each way
MAX_CLASSES = 1_000
MAX_NESTING = 60  # of calls in callbacks in calls; what is deeper is a RecursionError
COMPARE = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
NUMERIC = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "lshift", "rshift", "and",
           "xor", "or")
BINARY = (*COMPARE, *(f"__{prefix}{name}__" for name in NUMERIC for prefix in ("", "r", "i") if prefix + name !=
                      "idivmod"))
UNARY = tuple(f"__{name}__" for name in (
    "hash", "repr", "str", "bytes", "format", "bool", "len", "length_hint", "iter", "next", "reversed", "neg",
    "pos", "abs", "invert", "int", "float", "complex", "index", "round", "trunc", "floor", "ceil", "fspath"))
SPECIAL = (*BINARY, *UNARY, *(f"__{name}__" for name in (
    "contains", "getitem", "setitem", "delitem", "call", "enter", "exit")))
LOCAL = {"__class__", "__reduce_ex__", "__reduce__"}
LOCAL_OF_EXCEPTIONS = LOCAL | {"args", "with_traceback", "add_note", "__notes__", "__traceback__", "__cause__",
                               "__context__", "__suppress_context__", "__str__", "__repr__"}


class RemoteType(type):
    """The class of a class of proxies."""

    def __new__(cls, name, bases, namespace, peer=None):
        if peer is None:
            raise next(b for b in bases if type(b) is RemoteType).__peer__.refuse(
                f"a class that inherits from {bases[0].__qualname__} of the other side")
        return super().__new__(cls, name, bases, namespace | {"__peer__": peer})

    def __init__(cls, name, bases, namespace, peer=None):
        super().__init__(name, bases, namespace)

    def __call__(cls, *args, **kwargs):
        return cls.__peer__.operate("invoke", cls.__name__, cls, args, kwargs)

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        return cls.__peer__.operate("get", name, cls)

    def __setattr__(cls, name, value):
        cls.__peer__.operate("set", name, cls, (value,))

    def __delattr__(cls, name):
        cls.__peer__.operate("del", name, cls)

    def __iter__(cls):
        return cls.__peer__.operate("special", "__iter__", cls)

    def __len__(cls):
        return cls.__peer__.operate("special", "__len__", cls)

    def __bool__(cls):
        return True

    def __getitem__(cls, key):
        return cls.__peer__.operate("special", "__getitem__", cls, (key,))

    def __contains__(cls, item):
        return cls.__peer__.operate("special", "__contains__", cls, (item,))


class RemoteObject:
    """What all proxies do; the special methods that their class defines are added to it."""

    def __getattribute__(self, name):
        local = LOCAL_OF_EXCEPTIONS if issubclass(type(self), BaseException) else LOCAL
        if name in local:
            return object.__getattribute__(self, name)
        return type(self).__peer__.operate("get", name, self)

    def __setattr__(self, name, value):
        if issubclass(type(self), BaseException) and name in LOCAL_OF_EXCEPTIONS:
            object.__setattr__(self, name, value)
        else:
            type(self).__peer__.operate("set", name, self, (value,))

    def __delattr__(self, name):
        type(self).__peer__.operate("del", name, self)

    def __copy__(self):
        return type(self).__peer__.operate("copy", "copy", self)

    def __deepcopy__(self, memo):
        return type(self).__peer__.operate("copy", "deepcopy", self)

    def __reduce_ex__(self, protocol):
        raise type(self).__peer__.refuse(f"pickling of {type(self).__name__}")


def default_repr(self):
    return f"<{type(self).__module__}.{type(self).__qualname__} object>"


def special_method(name: str):
    op = "invoke" if name == "__call__" else "special"

    def method(self, *args, **kwargs):
        if name == "__exit__":
            args = (*args[:2], None)  # no traceback crosses
        return type(self).__peer__.operate(op, name, self, args, kwargs)
    return method


METHODS = {name: special_method(name) for name in SPECIAL}


class Ref(weakref.ref):
    """A weak reference to a proxy, with the number of what it stands for."""
    __slots__ = ("address", "number", "trust")  # trust: see sandbox_trust.py


def standard_exception(kind: type) -> list[str] | None:
    """[module, name] of an exception class that the other side has too."""
    top = kind.__module__.partition(".")[0]
    found = getattr(sys.modules.get(kind.__module__), kind.__qualname__, None)
    known = top in sys.stdlib_module_names and top not in ("unittest", "bdb", "doctest")
    return [kind.__module__, kind.__qualname__] if known and found is kind and issubclass(kind, BaseException) \
        else None


class Handles:
    """The two tables of one side. `offers` says what the objects of this side are to the other."""
    TAGS = ("own", "obj", "fun", "gen", "class", "builtin", "exc", "name")

    def __init__(self, peer: "Peer", offers):
        self.peer, self.offers, self.next_number = peer, offers, 0
        self.mine: dict[int, object] = {}
        self.numbers: dict[int, int] = {}  # id of an object of this side -> number
        self.theirs: dict[int, Ref] = {}
        self.addresses: dict[int, Ref] = {}  # id of a proxy -> reference to it
        self.classes: dict[int, type] = {}  # classes of the other side: never given back
        self.described: dict[int, int] = {}  # id of a class of this side -> number
        self.class_numbers: set[int] = set()  # kept for good
        self.unsent: list[list] = []  # descriptions of classes
        self.free: dict[int, None] = {}  # numbers whose proxies are gone
        self.arrived: list[object] = []  # proxies of the frames since this list was emptied

    # what goes with a frame

    def news(self) -> dict:
        self.sending = list(self.free)
        return ({"classes": self.unsent} if self.unsent else {}) | ({"free": self.sending} if self.sending else {})

    def sent(self) -> None:
        self.unsent = []
        for number in self.sending:
            self.free.pop(number, None)

    def undo(self, first: int) -> None:
        for number in range(first, self.next_number):
            if number in self.mine and number not in self.class_numbers:
                del self.numbers[id(self.mine.pop(number))]

    def hear(self, message: dict) -> None:
        for number in message.get("free", ()):
            if number in self.mine and number not in self.class_numbers:
                del self.numbers[id(self.mine.pop(number))]
        for number, name, qualname, module, doc, bases, methods, blocked in message.get("classes", ()):
            if len(self.classes) >= MAX_CLASSES or type(number) is not int or number in self.classes:
                raise Broken("too many classes")
            self._build_class(number, name, qualname, module, doc, bases, methods, blocked)

    # objects of this side

    def encode(self, value: object, depth: int) -> list:
        if id(value) in self.addresses:
            return ["own", self.addresses[id(value)].number]
        if type(value) is Remaining:
            return ["own", value.number]
        if isinstance(value, type):
            if value in CLASS_NAMES:
                return ["builtin", CLASS_NAMES[value]]
            if standard_exception(value):
                return ["builtin", *standard_exception(value)]
        elif isinstance(value, BaseException) and vars(builtins).get(type(value).__name__) is type(value):
            return ["exc", type(value).__name__, *self._arguments(value, depth)]
        tag, *info = self.offers.present(value)
        if tag == "name":
            return [tag, *info]
        if tag == "class":
            return ["class", self._describe_class(value)]
        kind = self._describe_class(type(value)) if tag == "obj" else None
        if id(value) not in self.numbers:
            if len(self.mine) >= MAX_HANDLES:
                raise Unplain(f"more than {MAX_HANDLES} objects ({type_name(value)})")
            self._export(value)
        if isinstance(value, BaseException):
            info = self._arguments(value, depth)
        return [tag, self.numbers[id(value)], *([kind] if kind is not None else []), *info]

    def _export(self, value: object) -> int:
        number, self.next_number = self.next_number, self.next_number + 1
        self.mine[number], self.numbers[id(value)] = value, number
        return number

    def _arguments(self, exc: BaseException, depth: int) -> list:
        """The arguments of an exception; the text of those that cannot cross."""
        encoded = []
        for argument in exc.args:
            try:
                encoded.append(self.peer.wire._encode(argument, depth + 1))
            except Unplain:
                try:
                    encoded.append(str(str(argument)))
                except Exception:  # noqa: BLE001, its __str__ may do anything
                    encoded.append("unprintable")
        return encoded

    def _describe_class(self, kind: type) -> int:
        if id(kind) in self.described:
            return self.described[id(kind)]
        if len(self.described) >= MAX_CLASSES:
            raise Unplain(f"more than {MAX_CLASSES} classes")
        bases = []
        for base in kind.__bases__:
            if standard_exception(base):
                bases.append(["builtin", *standard_exception(base)])
            elif type(base) is RemoteType:
                raise Unplain(f"{kind.__qualname__}, which inherits from a class of the other side")
            elif base is not object:
                bases.append(["class", self._describe_class(base)])
        if standard_exception(kind):
            bases = [["builtin", *standard_exception(kind)]]
        names = self.offers.special_names(kind)
        number = self.described[id(kind)] = self._export(kind)
        self.class_numbers.add(number)
        doc = kind.__doc__ if isinstance(kind.__doc__, str) else None
        self.unsent.append([number, kind.__name__, kind.__qualname__, str(kind.__module__), doc, bases,
                            [name for name in names if vars(kind)[name] is not None],
                            [name for name in names if vars(kind)[name] is None]])
        return number

    # objects of the other side

    def decode(self, tag: str, parts: list, depth: int) -> object:
        if tag == "own":
            return self.mine[parts[0]]
        if tag == "builtin":
            return CLASSES[parts[0]] if len(parts) == 1 else self._standard(*parts)
        if tag == "exc":
            return rebuild([parts[0]], [self.peer.wire._decode(part, depth + 1) for part in parts[1:]])
        if tag == "name":
            return self.offers.named(*parts)
        if tag == "class":
            proxy = self.classes[parts[0]]
        else:
            ref = self.theirs.get(parts[0])
            proxy = ref() if ref else None
            if proxy is None:
                if len(self.theirs) >= MAX_HANDLES or type(parts[0]) is not int:
                    raise Broken("too many objects")
                proxy = self._new_proxy(tag, parts, depth)
                self._register(proxy, parts[0])
                self.free.pop(parts[0], None)
        self.arrived.append(proxy)
        return proxy

    def _new_proxy(self, tag: str, parts: list, depth: int) -> object:
        if tag == "obj":
            arguments = [self.peer.wire._decode(part, depth + 1) for part in parts[2:]]
            return new_object(self.classes[parts[1]], arguments)
        if tag == "fun":
            return self._relay_function(*parts[1:])
        return self._relay_generator(parts[0])

    def _register(self, proxy: object, number: int) -> None:
        ref = Ref(proxy, self._gone)
        ref.number, ref.address, ref.trust = number, id(proxy), None
        self.theirs[number] = self.addresses[id(proxy)] = ref

    def _gone(self, ref: Ref) -> None:
        if self.addresses.get(ref.address) is ref:
            del self.addresses[ref.address]
        if self.theirs.get(ref.number) is ref:
            del self.theirs[ref.number]
            self.free[ref.number] = None

    def _standard(self, module: str, name: str) -> type:
        kind = getattr(sys.modules[module], name)
        if not isinstance(kind, type) or standard_exception(kind) != [module, name]:
            raise Broken("an unknown exception")
        return kind

    def _build_class(self, number, name, qualname, module, doc, bases, methods, blocked) -> None:
        parents = [self._standard(*base[1:]) if base[0] == "builtin" else self.classes[base[1]] for base in bases]
        parents = [parent for parent in parents if type(parent) is RemoteType] + [
            parent for parent in parents if type(parent) is not RemoteType]
        if not any(type(parent) is RemoteType for parent in parents):
            parents.insert(0, RemoteObject)
        namespace = {method: METHODS[method] for method in methods} | dict.fromkeys(blocked)
        if not any(issubclass(parent, BaseException) for parent in parents):
            namespace.setdefault("__repr__", default_repr)
        namespace |= {"__qualname__": str(qualname), "__module__": str(module), "__doc__": doc}
        if "__eq__" in namespace and "__hash__" not in namespace:
            namespace["__hash__"] = None
        proxy = RemoteType(name, tuple(parents), namespace, peer=self.peer)
        self.classes[number] = proxy
        self._register(proxy, number)

    def _relay_function(self, name, doc):
        def relay(*args, **kwargs):
            return self.peer.operate("invoke", name, relay, args, kwargs)
        relay.__name__ = relay.__qualname__ = str(name)
        relay.__doc__ = doc
        return relay

    def _relay_generator(self, number: int):
        """A generator of the other side as a generator of this one."""
        target = Remaining(number)
        name, args = "__next__", ()
        while True:
            try:
                value = self.peer.operate("special", name, target, args)
            except StopIteration as end:
                return end.value
            try:
                args = ((yield value),)
                name, args = ("send", args) if args[0] is not None else ("__next__", ())
            except GeneratorExit:  # also when it is collected, so there is nothing to be asked here
                raise
            except BaseException as exc:  # noqa: BLE001, passed on
                name, args = "throw", (exc,)


class Remaining:
    """Names a generator of the other side, without holding the proxy that the caller runs."""
    def __init__(self, number: int):
        self.number = number


def new_object(kind: type, arguments: list) -> object:
    standard = next((base for base in kind.__mro__ if issubclass(base, BaseException)
                     and type(base) is not RemoteType), object)
    if standard is object:
        return object.__new__(kind)
    builtin = next(base for base in standard.__mro__ if base.__module__ == "builtins")
    made = builtin.__new__(kind, *arguments)
    object.__setattr__(made, "args", tuple(arguments))
    return made


class Peer:
    """One end of the conversation. `perform(request, value)` gives what answers a request of the other side."""

    def __init__(self, wire: Wire, offers, perform, folder: str):
        self.wire, self.perform, self.folder = wire, perform, folder
        self.turn = threading.RLock()  # whose thread may use the wire
        self.depth = 0
        self.handles = wire.handles = Handles(self, offers)

    def operate(self, op: str, name: str, target: object, args: tuple = (), kwargs: dict | None = None) -> object:
        """An operation on a proxy."""
        return self.answer(*self.ask({"op": op, "name": name}, self.packed(target, args, kwargs)))

    def is_proxy(self, value: object) -> bool:
        return id(value) in self.handles.addresses

    def packed(self, target: object, args: tuple, kwargs: dict | None) -> tuple:
        return target, args, tuple((kwargs or {}).items())

    def ask(self, request: dict, value: object) -> tuple[dict, object]:
        with self.turn:
            self.wire.send(request, value)
            while True:
                reply, answer = self.wire.recv()
                if "op" not in reply:
                    return reply, answer
                self.serve(reply, answer)

    def answer(self, reply: dict, value: object) -> object:
        if "raise" in reply:
            raise value
        if "unplain" in reply:
            raise TypeError(f"a value of type {reply['unplain']} cannot cross")
        return value

    def refuse(self, reason: str) -> BaseException:
        return TypeError(reason)

    def serve(self, request: dict, value: object) -> None:
        """Answer one request; `turn` is held, but not while the request is carried out."""
        self.turn.release()
        self.depth += 1
        try:
            if self.depth > MAX_NESTING:
                raise RecursionError("calls between tests and solution are nested too deep")
            reply, value = self.perform(request, value)
        except BaseException as exc:  # noqa: BLE001, it is the caller's
            reply, value = describe(exc, self.folder)
        finally:
            self.depth -= 1
            self.turn.acquire()
        self.reply(reply, value)

    def reply(self, reply: dict, value: object) -> None:
        try:
            self.wire.send(reply, value)
        except Unplain as exc:
            self.wire.send({"unplain": str(exc)}, changes=False)
        except MemoryError:
            self.wire.send({"memory": True}, changes=False)
