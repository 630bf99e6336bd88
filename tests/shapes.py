"""Checks the shapes and dtypes in signatures of jmx while tests run: every call, traced or computed.

jmx's own errors come first: a call that breaks its signature is an error here only if the function accepts it. Then the
signature is wrong, or the caller passes arrays that it should not. `JMX_TEST_SHAPES=0` turns the check off.
"""

import ast
import functools
import importlib.abc
import importlib.machinery
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import jaxtyping

_PACKAGE = "jmx"
_KINDS = {"Bool", "Float", "Float32", "Int", "Int8", "Int16", "Int32", "Integer", "Key", "Num", "Shaped"} | {
    f"UInt{bits}" for bits in ("", 8, 16, 32)
}


class SignatureError(AssertionError):
    """A function accepted, or returned, an array that its signature does not allow."""


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which raises SignatureError for arrays that its annotations do not allow."""
    signature = inspect.signature(function)
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    hints = {name: hint for name, hint in function.__annotations__.items() if _has_arrays(hint)}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # raises it
        with jaxtyping.jaxtyped("context"):  # in which a name of an axis has one size
            expected = {name: _of_all(hint, kinds[name]) for name, hint in hints.items() if name in given}
            wrong = next((name for name, hint in expected.items() if not fits(given[name], hint)), None)
            fault = None if wrong is None else _fault(function, f"`{wrong}`", given[wrong], expected[wrong])
            result = function(*args, **kwargs)  # what it rejects may be of any type
            if fault is None and "return" in hints and not fits(result, hints["return"]):
                fault = _fault(function, "the result", result, hints["return"])
        if fault is not None:
            raise SignatureError(fault)
        return result

    return call


def _of_all(hint: Any, kind: Any) -> Any:
    """The annotation of `*name` or `**name` as that of the tuple or dict which the function has."""
    if kind is inspect.Parameter.VAR_POSITIONAL:
        return tuple[hint, ...]
    return dict[str, hint] if kind is inspect.Parameter.VAR_KEYWORD else hint


def _is_array(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray)


def _has_arrays(hint: Any) -> bool:
    return _is_array(hint) or any(_has_arrays(part) for part in typing.get_args(hint))


def fits(value: Any, hint: Any) -> bool:
    """Whether the arrays in `value` are those of the annotation `hint`; what it says beside arrays is not checked."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if _is_array(hint):
        return isinstance(value, hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if hint is None or hint is types.NoneType:
        return value is None
    if not _has_arrays(hint):
        return hint is Any or not isinstance(hint, type) or isinstance(value, hint)
    if origin is tuple and isinstance(value, tuple):
        pairs = [(part, parts[0]) for part in value] if parts[-1] is ... else [*zip(value, parts, strict=False)]
        return (parts[-1] is ... or len(value) == len(parts)) and all(fits(*pair) for pair in pairs)
    if origin is list and isinstance(value, list):
        return all(fits(part, parts[0]) for part in value)
    if isinstance(value, Mapping):
        return all(fits(part, parts[-1]) for part in value.values())
    return True  # callables, iterators


def _fault(function: Callable[..., Any], what: str, value: Any, hint: Any) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", type(value).__name__)
    return f"{what} of {function.__module__}.{function.__qualname__} (shape {shape}, {dtype}) must be {hint}"


class _Decorating(ast.NodeTransformer):
    """Puts `checked` around every function whose annotations name a kind of array."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        a = node.args
        annotations = [arg.annotation for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if arg]
        names = {
            part.value.id
            for annotation in (*annotations, node.returns)
            if annotation is not None
            for part in ast.walk(annotation)
            if isinstance(part, ast.Subscript) and isinstance(part.value, ast.Name)
        }
        if names & _KINDS:
            decorator = ast.parse("__import__('sys').modules['shapes'].checked", mode="eval").body
            node.decorator_list.append(ast.copy_location(decorator, node))  # the last one: below jit
            ast.fix_missing_locations(node)
        return node


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> Any:  # not through __pycache__, where other programs would find it
        path = self.get_filename(fullname)
        tree = _Decorating().visit(ast.parse(self.get_data(path), path))
        return compile(tree, path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != _PACKAGE:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
                spec.loader = _Loader(spec.loader.name, spec.loader.path)
            if spec is not None:
                return spec
        return None


def install() -> None:
    """Checks every module of jmx that is imported from here on."""
    assert _PACKAGE not in sys.modules, "jmx must not be imported yet"
    sys.meta_path.insert(0, _Finder())
