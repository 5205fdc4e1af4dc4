"""Find calls of libraries in the sources of rlfuse and bind them to the installed signatures.

No function is executed. Names are resolved from imports; the class of a variable is inferred from its annotation, from
the call that created it, or from the table that the caller passes. An unresolved call is an error if it can only belong
to a library: its name is imported from one, or is a method that only a class of the table has.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import collections
import importlib
import importlib.util
import inspect
import io
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

LIBRARIES = (
    "vllm",
    "deepspeed",
    "ray",
    "torch.distributed",
    "torch.cuda",
    "torch.multiprocessing",
    "torch.accelerator",
    "torch.optim",
    "torch.utils.deterministic",
    "torch.use_deterministic_algorithms",
)
STUBS = ("_C/_distributed_c10d.pyi",)
"""Stubs in torch's folder, with the signatures of compiled functions, including those of CUDA builds."""


@dataclass(frozen=True)
class Bound:
    """Call whose arguments match the signature."""

    target: str
    at: str


@dataclass
class Reading:
    """Result of reading sources."""

    bound: list[Bound] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def targets(self, library: str) -> list[str]:
        return [bound.target for bound in self.bound if bound.target.startswith(library + ".")]


def read(
    sources: Mapping[str, str], receivers: Mapping[str, str], passed: Mapping[str, Sequence[str]] | None = None
) -> Reading:
    """Bind every call in `sources` (name -> text), and every method that overrides a library's.

    `receivers`: "file.py: expression" -> the dotted name of its class. `passed`: "file.py: name" -> the functions that
    may be passed as this name.
    """
    reading = Reading()
    trees = {name: ast.parse(text) for name, text in sources.items()}
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    own_names = {
        node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, functions)
    } | common()
    method_owners = {method: name for name in set(receivers.values()) for method in methods(resolve(name)) - own_names}
    for name, tree in trees.items():
        _File(name, tree, receivers, passed or {}, method_owners, reading).visit(tree)
    return reading


class _File(ast.NodeVisitor):
    """One source file: names in scope, and the objects they refer to."""

    def __init__(
        self,
        name: str,
        tree: ast.AST,
        receivers: Mapping[str, str],
        passed: Mapping[str, Sequence[str]],
        method_owners: Mapping[str, str],
        reading: Reading,
    ):
        self.name, self.method_owners, self.reading = name, method_owners, reading
        self.imported, self.passed = dict(_imports(tree)), self._mine(passed)
        self.scopes: list[dict[str, str]] = [self._mine(receivers)]
        """Expression -> dotted name of its class."""

    def _mine(self, table: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key.removeprefix(self.name + ": "): held for key, held in table.items() if key.startswith(self.name + ": ")
        }

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        bases = [resolve(name) for base in node.bases if (name := self.dotted(base)) and name.split(".")[0] != "torch"]
        for method in node.body if bases else ():
            if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and not method.name.startswith("_"):
                self.overrides(method, bases)
        self.generic_visit(node)

    def overrides(self, method: ast.FunctionDef | ast.AsyncFunctionDef, bases: Sequence[type]) -> None:
        """Check that an overriding method exists in the library's base class and accepts the same arguments."""
        at = f"{self.name}:{method.lineno}"
        base = next((base for base in bases if hasattr(base, method.name)), None)
        if base is None:
            names = " or ".join(base.__name__ for base in bases)
            return self.reading.problems.append(f"{at}: {names} has no {method.name}, so the override is never called")
        theirs, ours = getattr(base, method.name), _signature(method.args)
        if callable(theirs):
            takes = list(inspect.signature(theirs).parameters.values())
            try:
                _offer(ours, takes)
            except TypeError as error:
                return self.reading.problems.append(
                    f"{at}: {method.name}() of {base.__name__} has another signature: {error}"
                )
        self.reading.bound.append(Bound(f"{base.__module__}.{base.__qualname__}.{method.name}", at))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        annotated = {a.arg: held for a in arguments if a.annotation and (held := self.annotation(a.annotation))}
        self.scopes.append(annotated)
        imported, names = self.imported, {a.arg for a in arguments}
        self.imported = {name: held for name, held in imported.items() if name not in names}
        self.generic_visit(node)
        self.imported = imported
        self.scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple):  # only the first element of a returned tuple is known
                values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
                pairs = zip(target.elts, values, strict=False)
            self.scopes[-1] |= {ast.unparse(name): held for name, value in pairs if (held := self.held(value))}

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if held := self.annotation(node.annotation):
            self.scopes[-1][ast.unparse(node.target)] = held

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        at, call_text = f"{self.name}:{node.lineno}", ast.unparse(node.func)
        try:
            if targets := self.targets(node.func):
                for target in targets:
                    bind(target, node)
                    self.reading.bound.append(Bound(target, at))
            elif isinstance(node.func, ast.Attribute) and node.func.attr in self.method_owners:
                known, holder = self.method_owners[node.func.attr], ast.unparse(node.func.value)
                self.reading.problems.append(
                    f"{at}: {call_text}() may be a method of {known}: add {holder} to the receivers"
                )
        except (AttributeError, ImportError, TypeError) as error:
            self.reading.problems.append(f"{at}: {call_text}(): {error}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Check that an attribute of a library, or of an instance of its class, exists."""
        self.generic_visit(node)
        try:
            held, name = self.held(node.value), self.dotted(node)
            if name:
                resolve(name)
            elif held and not hasattr(resolve(held), node.attr) and node.attr not in attributes(held):
                raise AttributeError(f"{held} has no {node.attr}")
        except (AttributeError, ImportError) as error:
            self.reading.problems.append(f"{self.name}:{node.lineno}: {error}")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            try:
                if name := self.dotted(ast.Name(alias.asname or alias.name)):
                    resolve(name)
            except (AttributeError, ImportError) as error:
                self.reading.problems.append(f"{self.name}:{node.lineno}: {error}")

    def targets(self, called: ast.expr) -> Sequence[str]:
        target = self.target(called)
        return [target] if target else self.passed.get(ast.unparse(called), ())

    def target(self, called: ast.expr) -> str | None:
        """Return the dotted name of the called function of a library, or None. Methods are named by their class."""
        if isinstance(called, ast.Attribute) and (held := self.held(called.value)):
            return f"{held}.{called.attr}"
        return self.dotted(called)

    def held(self, value: ast.expr) -> str | None:
        """Return the dotted name of an expression's class."""
        expression = ast.unparse(value)
        for scope in reversed(self.scopes):
            if expression in scope:
                return scope[expression]
        return self.made_by(value)

    def made_by(self, value: ast.expr) -> str | None:
        """Return the class of a call's result: the class that is called, or the function's return annotation."""
        value = value.value if isinstance(value, ast.Await) else value
        if not isinstance(value, ast.Call) or not (target := self.target(value.func)):
            return None
        try:
            resolved = resolve(target)
        except (AttributeError, ImportError):
            return None  # reported where the call is bound
        return target if inspect.isclass(resolved) or isinstance(resolved, ast.ClassDef) else RETURNS.get(target)

    def annotation(self, node: ast.expr) -> str | None:
        name = self.dotted(node)
        return name if name and name not in OURS_BEHIND and inspect.isclass(resolve(name)) else None

    def dotted(self, node: ast.expr) -> str | None:
        """Return the full dotted name of a library's object; None for other expressions."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.imported:
            return None
        name = ".".join([self.imported[node.id], *reversed(parts)])
        return name if any(name == each or name.startswith(each + ".") for each in LIBRARIES) else None


RETURNS = {
    "deepspeed.initialize": "deepspeed.DeepSpeedEngine",
    "vllm.v1.engine.async_llm.AsyncLLM.from_engine_args": "vllm.v1.engine.async_llm.AsyncLLM",
    "vllm.v1.engine.llm_engine.LLMEngine.from_engine_args": "vllm.v1.engine.llm_engine.LLMEngine",
}
"""Return classes of functions without an annotation; the first element of a tuple."""
UNSIGNED = ("ray._raylet.GcsClient",)
"""Compiled classes without a signature; end-to-end tests on several nodes construct them."""
OURS_BEHIND = ("ray.actor.ActorHandle",)
"""Classes whose instances delegate to a class of rlfuse."""


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


# Installed ------------------------------------------------------------------------------------------------------------


@cache
def resolve(dotted: str) -> Any:
    """Return the imported object of this name, or its `ast` node in a stub. Raises AttributeError if neither exists."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        module = ".".join(parts[:count])
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name and (module == error.name or module.startswith(error.name + ".")):
                continue
            raise
        for index, part in enumerate(parts[count:], count):
            if not hasattr(found, part):
                return _of_stub(parts[index:], dotted)
            found = getattr(found, part)
        return found
    raise ImportError(f"there is no module {parts[0]}")


def _of_stub(parts: list[str], dotted: str) -> ast.AST:
    for file in STUBS:
        node: ast.AST | None = _stub(file)
        for part in parts:
            node = next((each for each in getattr(node, "body", []) if getattr(each, "name", None) == part), None)
        if node is not None:
            return node
    raise AttributeError(f"{dotted} is not in the installed version")


@cache
def _stub(file: str) -> ast.Module:
    [folder] = importlib.util.find_spec("torch").submodule_search_locations
    return ast.parse((Path(folder) / file).read_text())


def bind(target: str, call: ast.Call) -> None:
    """Raise TypeError if the arguments do not match the installed signature of this name."""
    signature, bound_method = signature_of(target)
    given = [None] * sum(not isinstance(argument, ast.Starred) for argument in call.args)
    named = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    whole = len(given) == len(call.args) and len(named) == len(call.keywords)
    given = [None, *given] if bound_method else given
    (signature.bind if whole else signature.bind_partial)(*given, **named)


@cache
def signature_of(target: str) -> tuple[inspect.Signature, bool]:
    """Return (signature, whether its first parameter is an instance)."""
    found = resolve(target)
    if isinstance(found, ast.AST):
        return _signature_of_node(found)
    owner, _, name = target.rpartition(".")
    owner = resolve(owner)
    if not callable(found):
        raise TypeError(f"{target} can't be called")
    method = inspect.isclass(owner) and not inspect.isclass(found) and not inspect.ismethod(found)
    method = method and not isinstance(inspect.getattr_static(owner, name), staticmethod)
    if target in UNSIGNED:
        return inspect.signature(lambda *_, **__: None), method
    try:
        return inspect.signature(found), method
    except ValueError:  # compiled
        return _signature_of_node(_of_stub([owner.__name__, name] if method else [name], target))


def _offer(ours: inspect.Signature, takes: Sequence[inspect.Parameter]) -> None:
    """Bind `ours` to the calls that `takes` permits: all arguments, only required ones, and by keyword."""
    kinds = inspect.Parameter
    named = [each for each in takes[1:] if each.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    placed = [each for each in named if each.kind == kinds.POSITIONAL_OR_KEYWORD]
    rest = {each.name: None for each in named if each.kind == kinds.KEYWORD_ONLY}
    ours.bind(None, *placed, **rest)
    ours.bind(None, **{each.name: None for each in named})
    ours.bind(None, **{each.name: None for each in named if each.default is kinds.empty})


def _signature_of_node(node: ast.AST) -> tuple[inspect.Signature, bool]:
    """Return the signature of a class or function in a stub, from its first definition without `overload`."""
    if isinstance(node, ast.ClassDef):
        makers = [each for each in node.body if getattr(each, "name", None) == "__init__"]
        if not makers:
            return inspect.Signature(), False
        return _signature(makers[0].args), True
    if isinstance(node, ast.FunctionDef):
        return _signature(node.args), bool(node.args.args) and node.args.args[0].arg == "self"
    raise TypeError(f"{ast.unparse(node)} can't be called")


def _signature(arguments: ast.arguments) -> inspect.Signature:
    kinds, positional = inspect.Parameter, [*arguments.posonlyargs, *arguments.args]
    empty, optional = kinds.empty, len(positional) - len(arguments.defaults)
    found = [
        kinds(each.arg, kinds.POSITIONAL_ONLY if i < len(arguments.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD,
              default=empty if i < optional else None)
        for i, each in enumerate(positional)
    ]  # fmt: skip
    found += [kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL)] if arguments.vararg else []
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(kinds(each.arg, kinds.KEYWORD_ONLY, default=empty if default is None else None))
    found += [kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD)] if arguments.kwarg else []
    return inspect.Signature(found)


def methods(owner: Any) -> set[str]:
    """Return the public methods that a class defines, without inherited ones."""
    return {name for name, value in vars(owner).items() if callable(value) and not name.startswith("_")}


@cache
def attributes(dotted: str) -> frozenset[str]:
    """Return the attributes that methods of the class or its bases set on an instance."""
    found, whole = set(), resolve(dotted)
    if isinstance(whole, ast.ClassDef):
        return _declared(whole)
    for owner in whole.__mro__:
        found |= {*getattr(owner, "__annotations__", {})}
        if not owner.__module__.startswith("builtins"):
            tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
            stored = [each for each in ast.walk(tree) if isinstance(getattr(each, "ctx", None), ast.Store)]
            found |= {
                each.attr for each in stored if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self"
            }
            keys = (each.slice for each in stored if isinstance(each, ast.Subscript))  # torch's registry of modules
            found |= {key.value for key in keys if isinstance(key, ast.Constant)}
    return frozenset(found)


def _declared(node: ast.ClassDef) -> frozenset[str]:
    bases = (_declared(_of_stub(name.split("."), name)) for name in map(ast.unparse, node.bases))
    return frozenset(getattr(each, "name", None) or each.target.id for each in node.body).union(*bases)


@cache
def common() -> frozenset[str]:
    """Return the names of methods of Python's builtin types and of torch's tensors and modules."""
    owners = [getattr(builtins, name) for name in dir(builtins) if inspect.isclass(getattr(builtins, name))]
    owners += [Path, collections.deque, io.TextIOWrapper, io.BytesIO, asyncio.Task, asyncio.Event, asyncio.Queue]
    owners += [torch.Tensor, torch.nn.Module, torch, torch.cuda, torch.cuda.Event]
    return frozenset(name for owner in owners for name in dir(owner))
