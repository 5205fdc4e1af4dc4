"""Import rules: layers, no cycles, number of lines that `rlfuse train` reaches; maximum length of functions."""

import ast
import importlib.util
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from import_graph import MODULES, PACKAGE, ROOT, TRAIN, imports, lines, named, nodes, reach, strings

from rlfuse.config.documentation import keys

PACKAGES = [line.split() for line in """
    errors clock parsing files events samples protocols progress console user_folders tensor_files stopping
    config error_file
    algorithms
    costs
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
    application
    tools
    api notebook cli completion train
""".strip().splitlines()]  # fmt: skip
"""Layers, lowest first. A module imports only from its own line and the lines above it."""
RANK = {package: rank for rank, line in enumerate(PACKAGES) for package in line}
CORE = frozenset(package for package, rank in RANK.items() if rank <= RANK["run_folder"])
"""Packages that run in one process on simulated engines: they import no backend and no cluster code."""
BACKENDS = ("vllm", "deepspeed", "ray", "torch.distributed")
REACH = 55_750
"""Maximum number of lines that `rlfuse train` may reach; `python tests/import_graph.py` lists them."""
PRIVATE = {
    "rlfuse.engines.deepspeed": r"deepspeed(\.|$)|ds_\w+$",
    "rlfuse.engines.fsdp2": r"torch\.distributed\.(fsdp|tensor|device_mesh)\b",
}
"""Trainer backend -> names of its library."""
STAGE_KEY = {
    f"rlfuse.{name}"
    for name in (
        *("config.schema", "config.parallelism", "config.other_frameworks", "run.resume.changes"),
        *("tools.translate.openrlhf", "tools.translate.trl", "tools.translate.verl"),
    )
}
"""Files that declare, check, translate and resume `actor.zero_stage`."""
OF_DEEPSPEED = {
    "rlfuse.run.worker_imports",  # imports it once for all ranks
    "rlfuse.tools.doctor.examine",  # its compiled operations
    "rlfuse.tools.leftovers",
    "rlfuse.tools.planning.exchanges",  # the size of its buckets
}
TRANSLATORS = tuple(f"tools.translate.{name}" for name in ("openrlhf", "trl", "undecided", "verl"))
FUNCTION = {"rlfuse": 50, "jobs": 50, "tests": 60}
"""Maximum lines of a function; tests may contain a table."""


def package_of(module: str) -> str:
    return module.split(".")[1]


def third_party(module: str) -> set[str]:
    """Return the dotted names that it imports, uses as attributes, or contains as strings."""
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
def test_no_module_imports_from_a_higher_layer():
    """Include imports inside functions and for type checking, and names in strings."""
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
def test_a_trainer_backend_is_private_to_its_folder():
    """Check its library and its modules, except dotted names in the table of backends."""
    wrong = []
    for module in MODULES:
        used = third_party(module)
        used |= {each.rpartition(".")[2] for each in used} | {each for each in strings(module) if each[:3] == "ds_"}
        for folder, names in PRIVATE.items():
            if not module.startswith(folder) and module not in OF_DEEPSPEED:
                found = {each for each in imports(module) if each.startswith(f"{folder}.")}
                wrong += [f"{module}: {name}" for name in found | {each for each in used if re.match(names, each)}]
        text = MODULES[module].read_text()
        if "zero_stage" in text and not module.startswith("rlfuse.engines.deepspeed") and module not in STAGE_KEY:
            wrong.append(f"{module}: zero_stage")
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
def test_tools_are_only_referenced_by_name_in_the_cli():
    """Allow `rlfuse.api` and `rlfuse.notebook` to import tools; rlfuse/cli.py only names them."""
    importers = {
        f"{module} names {other}"
        for module in MODULES
        for other in imports(module) | named(module)
        if other.startswith("rlfuse.tools") and not module.startswith(("rlfuse.tools", "rlfuse.api", "rlfuse.notebook"))
    }
    assert {each.split()[0] for each in importers} == {"rlfuse.cli"}, importers
    assert not [each for each in imports("rlfuse.cli") if each.startswith("rlfuse.tools")]


@pytest.mark.slow
def test_nothing_imports_bundled_tasks():
    """Check the link `rlfuse.tasks` to jobs/tasks, which only `rlfuse prepare` uses, by its name in rlfuse/cli.py."""
    assert (PACKAGE / "tasks").resolve() == ROOT / "jobs" / "tasks"
    importers = [module for module in MODULES for other in imports(module) if ".tasks" in other]
    assert not importers


def engine_arguments() -> set[str]:
    """Return vLLM's engine arguments that are neither rlfuse keys nor attributes of transformers' configurations."""
    source = Path(importlib.util.find_spec("vllm").origin).parent / "engine" / "arg_utils.py"
    kinds = [node for node in ast.parse(source.read_text()).body if getattr(node, "name", "").endswith("EngineArgs")]
    names = {node.target.id for kind in kinds for node in kind.body if isinstance(node, ast.AnnAssign)}
    ours = {key.name.rpartition(".")[2] for key in keys()} | {"generation_config", "quantization_config"}
    return {name for name in names - ours if "_" in name}


BACKEND_NAMES = {
    "rlfuse.engines.vllm": (
        r"(?i)(?<![=.])\bvllm",
        engine_arguments,
        {
            "cli": "versions of the packages",
            "cluster.scratch": "files that it leaves in /dev/shm",
            "config.checks": "sizes among rollout.engine_kwargs, with which the memory plan computes, too",
            "config.rewards": "values of reward.model_backend",
            "config.other_frameworks": "keys of other frameworks",
            "config.quantization": "values of rollout.quantization, reported with the other keys'",
            "config.rollout": "a default",
            "engines.memory.estimate": "the argument by which an engine's activations are counted",
            "engines.rollout.engine_actor": "the table of backends",
            "observe.summary": "versions of the packages",
            "rewards.models.classifier": "values of reward.model_backend",
            "tools.doctor.examine": "versions of the packages",
            "tools.doctor.gpu": "whether the installed build fits the machine",
            **dict.fromkeys(TRANSLATORS, "keys of other frameworks"),
        },
    ),
}  # fmt: skip
"""Folder of a backend -> (pattern and table of its names, other modules that contain some, with the reason)."""


@pytest.mark.slow
@pytest.mark.parametrize("folder", BACKEND_NAMES)
def test_names_of_a_backend_occur_only_in_its_folder(folder):
    pattern, table, allowed = BACKEND_NAMES[folder]
    names, found = table(), {}
    for module in MODULES:
        texts = strings(module) | {name for name in third_party(module) if not name.startswith("rlfuse.")}
        if wrong := sorted(text for text in texts if re.search(pattern, text) or text in names):
            found[module.removeprefix("rlfuse.")] = wrong
    elsewhere = {module: wrong for module, wrong in found.items() if not f"rlfuse.{module}".startswith(folder)}
    assert elsewhere.keys() == allowed.keys(), {name: elsewhere.get(name) for name in elsewhere.keys() ^ allowed.keys()}
    assert found.keys() > elsewhere.keys()


@pytest.mark.slow
def test_train_reaches_no_tool_and_few_lines():
    reached = reach(TRAIN)
    assert {"rlfuse.step.controller", "rlfuse.run.worker_imports", "rlfuse.video.models.qwen3_vl"} <= reached
    assert not {package_of(module) for module in reached if module != "rlfuse"} & {"tools", "api", "notebook", "cli"}
    assert lines(reached) <= REACH


@pytest.mark.slow
def test_there_are_no_import_cycles():
    graph = {module: imports(module) for module in MODULES}
    cycle: list[str] = []
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        cycle = error.args[1]
    assert not cycle, f"import cycle: {' <- '.join(cycle)}"


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


@pytest.mark.slow
def test_no_file_defines_a_constant_twice():
    """Find duplicate definitions, as a merge may leave them: functions would read the second one."""
    duplicates = []
    for module, path in MODULES.items():
        constants = [node for node in nodes(path)[0].body if isinstance(node, ast.Assign | ast.AnnAssign)]
        parts = [part for each in constants for part in ast.walk(each) if isinstance(part, ast.Name)]
        names = [part.id for part in parts if isinstance(part.ctx, ast.Store) and part.id.isupper()]
        duplicates += [f"{module}: {name}" for name in sorted({name for name in names if names.count(name) > 1})]
    assert not duplicates, "\n".join(duplicates)
