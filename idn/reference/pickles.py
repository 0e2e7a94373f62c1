"""A pickle read as data: a small stack machine that knows no function it could call.

Python's own unpickler imports and calls what the file names. Here a name stays a name (`Global`), a call
stays a record of the call (`Inert`), and only plain containers, numbers, text and descriptions of tensors
come out as themselves. There is nothing to escape from: no value on the machine's stack can run.
"""

import pickletools
from dataclasses import dataclass, field
from typing import IO, Any, TypeAlias

import torch

Value: TypeAlias = Any  # whatever a pickle can hold

STORAGE_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class PickleError(ValueError):
    """The bytes are not a pickle, or one that uses what this machine does not read."""


@dataclass(frozen=True)
class Global:
    """The name of a class or function: never imported."""

    name: str


@dataclass(eq=False, repr=False)
class Inert:
    """An object that was not made: what would have been called, on what, and what it would then have held."""

    name: str
    args: tuple[Value, ...] = ()
    state: Value = None
    items: list[Value] = field(default_factory=list)
    mapping: dict[Value, Value] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<{self.name} object>"  # what it holds may be endless


@dataclass(frozen=True)
class Storage:
    """A run of numbers that lies elsewhere in the file."""

    key: str
    dtype: torch.dtype
    length: int
    offset: int = 0


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that is described but not yet read."""

    storage: Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def read_pickle(file: IO[bytes], storages: dict[str, Storage] | None = None) -> Value:
    """The value of the pickle that starts at the file's position, which moves to its end.

    `storages`, if given, collects every storage that the pickle mentions.

    >>> import io, pickle
    >>> read_pickle(io.BytesIO(pickle.dumps({"coeff": 0.98, "blocks": (4, 4, 4)})))
    {'coeff': 0.98, 'blocks': (4, 4, 4)}
    >>> read_pickle(io.BytesIO(pickle.dumps(print)))
    Global(name='builtins.print')
    """
    machine = _Machine({} if storages is None else storages)
    try:
        for opcode, argument, _ in pickletools.genops(file):
            if opcode.name == "STOP":
                return machine.pop()
            machine.step(opcode.name, argument)
    except PickleError:
        raise
    except (ValueError, TypeError, LookupError, RecursionError, OverflowError, MemoryError) as error:
        raise PickleError(f"not a readable pickle ({error})") from error
    raise PickleError("not a readable pickle (it has no end)")


class _Machine:
    """The pickle opcodes over a stack of plain values."""

    def __init__(self, storages: dict[str, Storage]) -> None:
        self.stack: list[Value] = []
        self.marked: list[list[Value]] = []
        self.memo: dict[int, Value] = {}
        self.storages = storages

    def pop(self) -> Value:
        return self.stack.pop()

    def pop_to_mark(self) -> list[Value]:
        items, self.stack = self.stack, self.marked.pop()
        return items

    def step(self, name: str, argument: Value) -> None:
        match name:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                self.marked.append(self.stack)
                self.stack = []
            case "POP" if self.stack:
                self.pop()
            case "POP" | "POP_MARK":
                self.pop_to_mark()
            case "DUP":
                self.stack.append(self.stack[-1])
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = self.stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = self.stack[-1]
            case "APPEND" | "APPENDS" | "ADDITEMS":
                items = [self.pop()] if name == "APPEND" else self.pop_to_mark()
                self.extend(self.stack[-1], items)
            case "SETITEM" | "SETITEMS":
                items = [self.pop(), self.pop()][::-1] if name == "SETITEM" else self.pop_to_mark()
                self.update(self.stack[-1], _pairs(items))
            case "BUILD":
                state = self.pop()
                # What a container carries beside its items (a state dict's version numbers) is not needed.
                if isinstance(self.stack[-1], Inert):
                    self.stack[-1].state = state
            case _:
                value = self.value(name, argument)  # may put another stack in place, so first
                self.stack.append(value)

    def value(self, name: str, argument: Value) -> Value:
        """What an opcode that adds one value to the stack adds."""
        match name:
            case "NONE":
                return None
            case "NEWTRUE" | "NEWFALSE":
                return name == "NEWTRUE"
            case "GET" | "BINGET" | "LONG_BINGET":
                return self.memo[argument]
            case "EMPTY_LIST":
                return []
            case "EMPTY_DICT":
                return {}
            case "EMPTY_TUPLE":
                return ()
            case "EMPTY_SET":
                return set()
            case "LIST":
                return self.pop_to_mark()
            case "DICT":
                return dict(_pairs(self.pop_to_mark()))
            case "TUPLE":
                return tuple(self.pop_to_mark())
            case "FROZENSET":
                return frozenset(self.pop_to_mark())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                return tuple([self.pop() for _ in range(int(name[-1]))][::-1])
            case "GLOBAL":
                return Global(argument.replace(" ", "."))
            case "STACK_GLOBAL":
                attribute, module = self.pop(), self.pop()
                return Global(f"{module}.{attribute}")
            case "REDUCE" | "NEWOBJ":
                args, callee = self.pop(), self.pop()
                return _call(callee, args)
            case "NEWOBJ_EX":
                keywords, args, callee = self.pop(), self.pop(), self.pop()
                return Inert(_name(callee), (*args, keywords))
            case "INST":
                return Inert(argument.replace(" ", "."), tuple(self.pop_to_mark()))
            case "OBJ":
                callee, *args = self.pop_to_mark()
                return _call(callee, tuple(args))
            case "PERSID" | "BINPERSID":
                return self.persistent(argument if name == "PERSID" else self.pop())
        if not isinstance(argument, int | float | str | bytes | bytearray) or name.startswith("EXT"):
            raise PickleError(f"not a readable pickle (opcode {name} has no place in a checkpoint)")
        return argument

    def persistent(self, identity: Value) -> Storage | Inert:
        """torch's ("storage", type, key, device, length[, view]); we read to the CPU whatever the device."""
        match identity:
            case ("storage", Global(kind), str(key), _, int(length), *view) if length >= 0:
                module, _, name = kind.rpartition(".")
                if module in ("torch", "torch.cuda") and name in STORAGE_DTYPES:
                    storage = Storage(key, STORAGE_DTYPES[name], length)
                    self.storages[key] = storage
                    match view:
                        case [(str(), int(offset), int(view_length))]:
                            return Storage(key, storage.dtype, view_length, offset)
                    return storage
        return Inert("persistent id", (identity,))

    @staticmethod
    def extend(target: Value, items: list[Value]) -> None:
        match target:
            case list():
                target.extend(items)
            case set():
                target.update(items)
            case Inert():
                target.items.extend(items)
            case _:
                raise PickleError(f"not a readable pickle (items added to a {type(target).__name__})")

    @staticmethod
    def update(target: Value, pairs: list[tuple[Value, Value]]) -> None:
        match target:
            case dict():
                target.update(pairs)
            case Inert():
                target.mapping.update(pairs)
            case _:
                raise PickleError(f"not a readable pickle (keys set on a {type(target).__name__})")


def _pairs(flat: list[Value]) -> list[tuple[Value, Value]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _name(callee: Value) -> str:
    return callee.name if isinstance(callee, Global | Inert) else type(callee).__name__


def _call(callee: Value, args: Value) -> Value:
    """The few calls that are understood, done by our own code; every other one is only written down."""
    match callee, args:
        case Global("collections.OrderedDict"), ():
            return {}
        case Global("collections.OrderedDict"), (list(pairs),):
            return dict(pairs)
        case Global("torch.Size"), (tuple(size) | list(size),):
            return tuple(size)
        case (
            Global("torch._utils._rebuild_tensor_v2" | "torch._utils._rebuild_tensor"),
            (Storage() as storage, int(offset), tuple(size), tuple(stride), *_),
        ):
            return StoredTensor(storage, offset, size, stride)
        case (
            Global("torch._utils._rebuild_parameter" | "torch._utils._rebuild_parameter_with_state"),
            (StoredTensor() as tensor, *_),
        ):
            return tensor
        case Global("torch._tensor._rebuild_from_type_v2"), (Global() as rebuild, _, tuple(inner), *_):
            return _call(rebuild, inner)
    return Inert(_name(callee), args if isinstance(args, tuple) else (args,))
