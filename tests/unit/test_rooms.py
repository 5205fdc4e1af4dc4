"""The house's order: who may import whom, no circles, and files and functions that fit on a few screens."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "rlfuse"
ROOMS = [line.split() for line in """
    errors clock parsing files events samples protocols progress console user_folders tensor_files
    config
    algorithms
    cluster
    rewards.api rewards.sandbox rewards.thoughts
    video
    data
    fusion
    engines
    rewards
    run_folder
    observe
    health
    step
    simulate
    planning
    whatif
    run
    report
    evaluation
    notebook
    doctor
    train cli
""".strip().splitlines()]  # fmt: skip
"""From the ground up; those on one line may import one another. A room imports from its own line and those above it."""
RANK = {room: rank for rank, line in enumerate(ROOMS) for room in line}
FUNCTION = {"rlfuse": 50, "jobs": 50, "tests": 60}
"""Lines of a function; that of a test may hold a table. Files have one concept, however long it is."""


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All that stands in a file."""
    return tuple(ast.walk(ast.parse(path.read_text())))


def room_of(module: str) -> str:
    """The innermost room of the list."""
    parts = module.split(".")[1:]
    return next(room for end in range(len(parts), 0, -1) if (room := ".".join(parts[:end])) in RANK)


@cache
def imports(module: str) -> set[str]:
    """Modules of rlfuse that this one imports, anywhere in it."""
    found = set()
    for node in nodes(MODULES[module]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rlfuse":
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "rlfuse"}
    return found - {"rlfuse", module}


@pytest.mark.slow
def test_no_import_runs_back_up():
    """Not even inside a function, or for type checking."""
    wrong = [
        f"{module} imports {other}"
        for module in MODULES
        for other in sorted(imports(module))
        if module != "rlfuse" and RANK[room_of(module)] < RANK[room_of(other)]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_nothing_imports_bundled_tasks():
    """`rlfuse.tasks` is a link to jobs/tasks: only `rlfuse prepare` goes there, by a name that rlfuse/cli.py has."""
    assert (PACKAGE / "tasks").resolve() == ROOT / "jobs" / "tasks"
    wanted = [module for module in MODULES for other in imports(module) if ".tasks" in other]
    assert not wanted


def test_every_room_of_the_list_is_there():
    assert {room_of(module) for module in MODULES if module != "rlfuse"} == set(RANK)


@pytest.mark.slow
def test_modules_import_in_no_circle():
    graph = {module: imports(module) for module in MODULES}
    circle: list[str] = []
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = error.args[1]
    assert not circle, f"modules import in a circle: {' <- '.join(circle)}"


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["rlfuse", "jobs", "tests"])
def test_functions_are_short(folder):
    long = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in nodes(path):
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if function and (length := node.end_lineno - node.lineno + 1) > FUNCTION[folder]:
                long.append(f"{path.relative_to(ROOT)}: {node.name} has {length} lines")
    assert not long, "\n".join(long)
