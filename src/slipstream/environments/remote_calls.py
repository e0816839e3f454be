"""Let tests in one process call functions in another one. Both exchange plain data alone, as JSON.
Calls go in this direction only.

Run in two sandboxes, whose descriptors 3 are the ends of a socket pair: `serve` with the solution, `test` with tests.
So a solution sees the arguments of calls and nothing else of the tests, and none of its classes reaches them.
Imports the standard library alone.
"""

import builtins
import importlib
import json
import math
import sys
import types
from collections.abc import Callable
from typing import Any

PLAIN = (bool, int, float, str, list, tuple, set, frozenset, dict, bytes)
OPERATIONS: dict[str, Callable[..., Any]] = {
    "__getattr__": getattr,
    "__setattr__": setattr,
    "__call__": lambda function, *arguments, **named: function(*arguments, **named),
    "__getitem__": lambda container, key: container[key],
    "__setitem__": lambda container, key, value: container.__setitem__(key, value),
    "__iter__": list,
    "__next__": next,
    "__len__": len,
    "__bool__": bool,
    "__str__": str,
    "__repr__": repr,
}


class Peer:
    """One end of the connection. The other end refers to `objects` of this one by number."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.source, self.sink = open(3), open(3, "w", buffering=1)

    def send(self, message: Any) -> None:
        self.sink.write(json.dumps(message) + "\n")

    def pack(self, value: Any) -> Any:
        """Plain data as JSON, and any other object as a number."""
        if type(value) is Remote:
            return {"object": object.__getattribute__(value, "_remote")[0]}
        if isinstance(value, types.ModuleType):
            raise AttributeError("tests import their own modules")
        value = value.tolist() if hasattr(value, "tolist") else value  # of numpy
        kind: Any = next((plain for plain in PLAIN if isinstance(value, plain)), None)
        if value is None or kind in (bool, int, float, str):
            return kind and kind(value)
        if kind is bytes:
            return {"bytes": value.hex()}
        if kind:
            items = [part for pair in value.items() for part in pair] if kind is dict else value
            return {kind.__name__: [self.pack(item) for item in items]}
        return {"object": self.keep(value)}

    def unpack(self, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        ((kind, content),) = data.items()
        if kind == "object":
            return self.refer(content)
        if kind == "bytes":
            return bytes.fromhex(content)
        items = [self.unpack(item) for item in content]
        if kind == "dict":
            return dict(zip(items[::2], items[1::2], strict=True))
        return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](items)

    def refer(self, number: int) -> Any:
        return self.objects[number]

    def keep(self, value: Any) -> int:
        self.objects.append(value)
        return len(self.objects) - 1

    def serve(self) -> None:
        """Answer the other end's operations on `objects` until it ends."""
        for line in self.source:
            operation, number, arguments, named = json.loads(line)
            try:
                result = OPERATIONS[operation](self.objects[number], *self.unpack(arguments), **self.unpack(named))
                answer = [self.pack(result)]
            except BaseException as error:
                answer = [[kind.__name__ for kind in type(error).__mro__], str(error)]
            self.send(answer)


class Tests(Peer):
    """The end of the tests."""

    def refer(self, number: int) -> Any:
        return Remote(number, self)

    def keep(self, value: Any) -> int:
        raise TypeError(f"tests can't pass a {type(value).__name__} to the solution")

    def ask(self, operation: str, number: int, *arguments: Any, **named: Any) -> Any:
        """The result of an operation on an object of the solution. Its exceptions are raised as built-in ones."""
        self.send([operation, number, self.pack(arguments), self.pack(named)])
        line = self.source.readline()
        if not line:
            raise SystemExit("the solution has ended")
        result, *error = json.loads(line)
        if error:
            kinds = [getattr(builtins, str(name), None) for name in result]
            raise next(k for k in [*kinds, RuntimeError] if isinstance(k, type) and issubclass(k, Exception))(*error)
        return self.unpack(result)


class Remote:
    """An object of the solution. Comparisons are not asked of it: its class would answer them."""

    def __init__(self, number: int, tests: Tests) -> None:
        object.__setattr__(self, "_remote", (number, tests))


def _remote_method(operation: str) -> Callable[..., Any]:
    def method(self: Remote, *arguments: Any, **named: Any) -> Any:
        number, tests = object.__getattribute__(self, "_remote")
        result = tests.ask(operation, number, *arguments, **named)
        return iter(result) if operation == "__iter__" else result

    return method


for operation in OPERATIONS:
    setattr(Remote, operation, _remote_method(operation))


class Names(dict[str, Any]):
    """The global names of tests: their own, built-in ones, those of the solution, modules of the standard library."""

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        try:
            return self["_tests"].ask("__getattr__", 0, name)
        except AttributeError:
            if name not in sys.stdlib_module_names:
                raise KeyError(name) from None
            return importlib.import_module(name)


def same(found: Any, expected: Any) -> bool:
    """Whether a result equals JSON: sequences of any kind, keys as text, floats within 1e-6."""
    if isinstance(expected, float) and isinstance(found, int | float):
        return math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-9)
    if isinstance(expected, list) and isinstance(found, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, dict) and isinstance(found, dict):
        found = {str(key): value for key, value in found.items()}
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    return type(found) in (*PLAIN, type(None)) and bool(found == expected)


def serve(code: str) -> None:
    """Run a solution, and answer the calls of the tests."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    peer = Peer()
    peer.objects.append(module)
    exec(compile(code, "solution.py", "exec"), module.__dict__)
    peer.serve()


def test(code: str) -> None:
    """Run tests on the solution at the other end. Any exception fails them."""
    exec(compile(code, "tests.py", "exec"), Names(_tests=Tests(), same=same, json=json, __name__="tests"))


if __name__ == "__main__":
    sys.set_int_max_str_digits(0)
    sys.setrecursionlimit(10000)
    {"serve": serve, "test": test}[sys.argv[1]](open("input.py").read())
