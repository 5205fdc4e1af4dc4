"""Who may import whom, no circles, how much `rlfuse train` reaches, and files and functions of readable length."""

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter

import pytest
from import_graph import MODULES, PACKAGE, ROOT, TRAIN, imports, lines, named, nodes, reach, strings

PACKAGES = [line.split() for line in """
    errors clock parsing files events samples protocols progress console user_folders tensor_files stopping
    config
    algorithms
    fusion
    step
    simulate
    run_folder
    cluster
    video
    data
    engines
    rewards
    observe
    health
    run
    train
    tools
    notebook cli
""".strip().splitlines()]  # fmt: skip
"""From the lowest up; those on one line may import one another. Each imports from its own line and those above it."""
RANK = {package: rank for rank, line in enumerate(PACKAGES) for package in line}
CORE = frozenset(package for package, rank in RANK.items() if rank <= RANK["run_folder"])
"""Runs in one process on simulated engines, and reads what a run left: no backend, no cluster."""
BACKENDS = ("vllm", "deepspeed", "ray", "torch.distributed")
REACH = 53_000
"""Lines that `rlfuse train` may reach; `python tests/import_graph.py` says where they are."""
FUNCTION = {"rlfuse": 50, "jobs": 50, "tests": 60}
"""Lines of a function; that of a test may hold a table. A file has one concept, however long."""


def package_of(module: str) -> str:
    return module.split(".")[1]


def third_party(module: str) -> set[str]:
    """Dotted names that it imports, uses as attributes, or has as strings."""
    found = {text for text in strings(module) if re.fullmatch(r"[a-z]\w*(\.\w+)+", text)}
    for node in nodes(MODULES[module]):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    return found


@pytest.mark.slow
def test_no_import_runs_back_up():
    """Not even inside a function, for type checking, or by a name in a string."""
    wrong = [
        f"{module} names {other}"
        for module in MODULES
        for other in sorted(imports(module) | named(module))
        if module != "rlfuse" and RANK[package_of(module)] < RANK[package_of(other)]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_the_core_imports_no_backend():
    wrong = [
        f"{module}: {name}"
        for module in MODULES
        if module != "rlfuse" and package_of(module) in CORE
        for name in third_party(module)
        if any(name == backend or name.startswith(f"{backend}.") for backend in BACKENDS)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_importing_the_core_loads_no_backend():
    core = [module for module in MODULES if module != "rlfuse" and package_of(module) in CORE]
    code = f"import importlib, sys; [importlib.import_module(each) for each in {core}]; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    loaded = set(done.stdout.split())
    assert "rlfuse.step.controller" in loaded and not loaded & {"vllm", "deepspeed", "ray"}
    others = {each for each in loaded if each.startswith("rlfuse.") and package_of(each) not in CORE}
    assert not others


@pytest.mark.slow
def test_tools_are_found_by_name_alone():
    """rlfuse/cli.py has their names, and `rlfuse.notebook` offers some of their functions."""
    wanted = {
        f"{module} names {other}"
        for module in MODULES
        for other in imports(module) | named(module)
        if other.startswith("rlfuse.tools") and not module.startswith(("rlfuse.tools", "rlfuse.notebook"))
    }
    assert {each.split()[0] for each in wanted} == {"rlfuse.cli"}, wanted
    assert not [each for each in imports("rlfuse.cli") if each.startswith("rlfuse.tools")]


@pytest.mark.slow
def test_nothing_imports_bundled_tasks():
    """`rlfuse.tasks` is a link to jobs/tasks: only `rlfuse prepare` goes there, by a name that rlfuse/cli.py has."""
    assert (PACKAGE / "tasks").resolve() == ROOT / "jobs" / "tasks"
    wanted = [module for module in MODULES for other in imports(module) if ".tasks" in other]
    assert not wanted


@pytest.mark.slow
def test_train_reaches_no_tool_and_few_lines():
    reached = reach(TRAIN)
    assert {"rlfuse.step.controller", "rlfuse.run.worker_imports", "rlfuse.video.models.qwen3_vl"} <= reached
    assert not {package_of(module) for module in reached if module != "rlfuse"} & {"tools", "notebook", "cli"}
    assert lines(reached) <= REACH


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
