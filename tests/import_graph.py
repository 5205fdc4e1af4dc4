"""Build the import graph of the package: imports anywhere in a file, and dotted names in strings.

`python tests/import_graph.py` prints the number of lines that `rlfuse train` reaches, by package and module.
"""

import ast
import os
import re
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "rlfuse"
DOTTED = re.compile(r"(?<![\w.])rlfuse(?:\.\w+)+")
TRAIN = "rlfuse.application"


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all syntax nodes of a file."""
    return tuple(ast.walk(ast.parse(path.read_text())))


@cache
def imports(module: str) -> frozenset[str]:
    """Return the rlfuse modules that this one imports, including imports inside functions and for type checking."""
    found = set()
    for node in nodes(MODULES[module]):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} has a relative import, which is not followed here"
            if (node.module or "").split(".")[0] == "rlfuse":
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {name if name in MODULES else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "rlfuse"}
    return frozenset(found - {"rlfuse", module})


@cache
def strings(module: str) -> frozenset[str]:
    """Return the strings of `module` and the constant parts of its f-strings, without docstrings."""
    all_nodes = nodes(MODULES[module])
    documentation = {id(node.value) for node in all_nodes if isinstance(node, ast.Expr)}
    return frozenset(
        node.value
        for node in all_nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation
    )


def inside(package: str) -> set[str]:
    return {each for each in MODULES if each.startswith(f"{package}.")}


@cache
def named(module: str) -> frozenset[str]:
    """Return the modules that strings of `module` name.

    All modules of a package if a string ends with the package and a dot (f-strings), or if its `__path__` is listed."""
    found = set()
    for text in strings(module):
        for match in DOTTED.finditer(text):
            name = match[0]
            if text[match.end() :] == ".":
                found |= inside(name)
            while name not in MODULES:
                name = name.rpartition(".")[0]
            found.add(name)
    for node in nodes(MODULES[module]):
        if isinstance(node, ast.Attribute) and node.attr == "__path__":
            for each in imports(module):
                found |= inside(each) if each.endswith(f".{ast.unparse(node.value)}") else set()
    return frozenset(found - {"rlfuse", module})


def reach(start: str, *, without: str | None = None) -> set[str]:
    """Return all modules and packages that `start` may import, except through `without`."""
    found, pending = set(), [start]
    while pending:
        module = pending.pop()
        if module not in found and module != without:
            found.add(module)
            pending += [*imports(module), *named(module), *filter(None, [module.rpartition(".")[0]])]
    return found


RECORDER = """
import os, sys
from pathlib import Path

class Recorder:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("rlfuse."):
            with Path(__file__).with_name(f"{os.getpid()}.imports").open("a") as file:
                file.write(name + "\\n")

sys.meta_path.insert(0, Recorder())
"""


def record_imports(folder: Path) -> dict[str, str]:
    """Return environment variables that make a command and its processes record their rlfuse imports in `folder`."""
    (folder / "sitecustomize.py").write_text(RECORDER)
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def recorded_imports(folder: Path) -> dict[str, set[str]]:
    """Return the imported modules of each process; a fork's inherited modules are listed with its parent."""
    found = {path.stem: {*path.read_text().split()} for path in folder.glob("*.imports")}
    return {process: {name for name in names if name in MODULES} for process, names in found.items()}


def lines(modules) -> int:
    return sum(MODULES[module].read_text().count("\n") for module in modules)


def main() -> None:
    """Print the lines that `rlfuse train` reaches, by package, and the lines reached through one module only."""
    reached = reach(TRAIN)
    print(
        f"{TRAIN} reaches {lines(reached):,} of {lines([*MODULES]):,} lines, {len(reached)} of {len(MODULES)} modules"
    )
    packages = Counter({module.split(".")[1]: 0 for module in MODULES if "." in module})
    for module in reached - {"rlfuse"}:
        packages[module.split(".")[1]] += lines([module])
    for package, count in packages.most_common():
        print(f"{count:7,}  {package}")
    print("through one module only:")
    alone = Counter({each: lines(reached - reach(TRAIN, without=each)) for each in reached - {TRAIN, "rlfuse"}})
    for module, count in alone.most_common(30):
        print(f"{count:7,}  {module}")


if __name__ == "__main__":
    main()
