"""Names in a Python script, without running it: imports, values, and changes to them. Pure.

A value is known only if the script binds its name once and neither changes it nor passes it to a function that may.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

READING = {"print", "len", "str", "repr", "list", "dict", "vars", "asdict", "info", "init", "isinstance", "type"}
"""Functions and methods that do not change their arguments."""
CHANGING = {
    "append",
    "extend",
    "insert",
    "remove",
    "pop",
    "clear",
    "update",
    "sort",
    "reverse",
    "setdefault",
    "__setattr__",
}
CHANGING_PREFIXES = ("set_", "add_", "remove_", "pop_")
"""Methods that change their object."""
Loop = ast.For | ast.AsyncFor | ast.While


class Bindings:
    """Imports, assignments and calls of a parsed script."""

    def __init__(self, tree: ast.Module):
        self.nodes = list(ast.walk(tree))
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.bases = {each.name: each.bases for each in self.nodes if isinstance(each, ast.ClassDef)}
        self._bound: dict[str, list[ast.expr | str | None]] = {}
        """Name -> a dotted origin, an expression or None for each place that binds it."""
        assigned: dict[ast.expr, ast.expr | None] = {}
        for node in self.nodes:
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                assigned[node.targets[0]] = node.value
            elif isinstance(node, ast.AnnAssign):
                assigned[node.target] = node.value
        for node in self.nodes:
            for name, value in _bound_by(node, assigned):
                self._bound.setdefault(name, []).append(value)
        self.stored: dict[str, set[str]] = {}
        """Name -> its attributes and items that are assigned, and methods that change it."""
        for node in self.nodes:
            if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
                self._store(node, node.attr if isinstance(node, ast.Attribute) else "[]")
            elif isinstance(node, ast.Call) and last_name(node.func) in ("setattr", "delattr") and node.args:
                self._store(node.args[0], "setattr")
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_changing(node.func.attr):
                self._store(node.func, node.func.attr)

    def _store(self, node: ast.AST, how: str) -> None:
        while isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        if isinstance(node, ast.Name):
            self.stored.setdefault(node.id, set()).add(how)

    def origin(self, node: ast.expr) -> str:
        """Return the dotted name under which an object is imported; empty if it is not, or not always, imported."""
        if isinstance(node, ast.Attribute):
            before = self.origin(node.value)
            return f"{before}.{node.attr}" if before else ""
        found = {*self._bound.get(node.id, [])} if isinstance(node, ast.Name) else set()
        only = found.pop() if len(found) == 1 else None
        return only if isinstance(only, str) else ""

    def is_imported(self, package: str) -> bool:
        """Return whether the script imports a package."""
        origins = {each for found in self._bound.values() for each in found if isinstance(each, str)}
        return any(origin.partition(".")[0] == package for origin in origins)

    def assigned(self, node: ast.expr) -> ast.expr:
        """Return the expression that a variable is assigned if that is its only one; other expressions unchanged."""
        found = self._bound.get(node.id, []) if isinstance(node, ast.Name) else []
        return found[0] if len(found) == 1 and isinstance(found[0], ast.expr) else node

    def expression(self, node: ast.expr) -> ast.expr:
        """Return the expression of a variable whose value is known; other expressions unchanged."""
        value = self.assigned(node)
        if not isinstance(node, ast.Name) or isinstance(value, ast.Constant):
            return value
        return node if node.id in self.stored or self.receivers(node.id) else value

    def receivers(self, name: str) -> list[str]:
        """Return the functions, other than trainers, to which a variable is passed and that may change it."""
        found = []
        for call in self.calls:
            function = last_name(call.func)
            passed = [*call.args, *(each.value for each in call.keywords if each.arg is not None)]
            if function not in READING and not (self.origin(call.func) or function).endswith("Trainer"):
                found += [function for each in passed if isinstance(each, ast.Name) and each.id == name]
        return found

    def literal(self, node: ast.expr) -> Any:
        """Return the value of a literal or of a variable with one. Raises ValueError for others."""
        return ast.literal_eval(self.expression(node))

    def variables(self, value: ast.expr) -> list[str]:
        """Return the variables that are assigned an expression with this value in it."""
        return [
            name
            for name, values in self._bound.items()
            if any(isinstance(each, ast.expr) and value in ast.walk(each) for each in values)
        ]

    def is_in_loop(self, value: ast.expr) -> bool:
        """Return whether a loop computes a value."""
        loops = [node for node in self.nodes if isinstance(node, Loop)]
        return any(value in ast.walk(loop) for loop in loops)


def last_name(node: ast.expr) -> str:
    """Return the last part of a dotted name; empty for other expressions."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_changing(method: str) -> bool:
    return method in CHANGING or method.startswith(CHANGING_PREFIXES)


def _bound_by(node: ast.AST, assigned: dict[ast.expr, ast.expr | None]) -> Iterator[tuple[str, ast.expr | str | None]]:
    """Yield the names that a node binds, with their origin or expression."""
    match node:
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
            yield name, assigned.get(node)
        case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name, None
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            yield name, None
        case ast.Import(names=names):
            for each in names:
                first = each.name.partition(".")[0]
                yield each.asname or first, each.name if each.asname else first
        case ast.ImportFrom(module=module, names=names, level=level):
            for each in names:
                yield each.asname or each.name, f"{'.' * level}{module or ''}.{each.name}"
