"""Checks the shapes and dtypes in signatures of jmx while tests run: every call, of whatever is traced or computed.

jmx's own errors come first: a call that breaks its signature is an error here only if the function accepts it. Then the
signature is not true, or the caller passes arrays that it should not. They run where `JMX_TEST_SHAPES=1` asks
for them.
"""

import ast
import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from typing import Any

import beartype
import jaxtyping

_PACKAGE = "jmx"
_KINDS = {"Bool", "Float", "Float32", "Int", "Int8", "Int16", "Int32", "Integer", "Key", "Num", "Shaped"} | {
    f"UInt{bits}" for bits in (8, 16, 32)
}


class SignatureError(AssertionError):
    """A function accepted, or returned, an array that its signature does not allow."""


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which raises SignatureError for arrays other than its annotations say."""
    strict = jaxtyping.jaxtyped(function, typechecker=_typechecker)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return strict(*args, **kwargs)
        except jaxtyping.TypeCheckError as violation:
            function(*args, **kwargs)  # what the function refuses may be of any type
            raise SignatureError(str(violation)) from None

    return call


_typechecker = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))


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
