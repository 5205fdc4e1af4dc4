"""Read a Python script that calls one trainer of TRL: the arguments of its trainer and config. Pure; never runs it."""

from __future__ import annotations

import ast
from typing import Any

from rlfuse.errors import ConfigError
from rlfuse.tools.translate.arguments import Command

COMPUTED = "the script computes the value"
MODEL, REWARDS = "model_name_or_path", "reward_funcs"
WITHOUT_MEANING = {"args", "eval_dataset", "processing_class", "tokenizer", "callbacks", "compute_metrics"}
"""Arguments of a trainer that the job does not need."""


def read_script(command: Command, text: str) -> Command:
    """Add the settings of a script. Raises ConfigError unless it calls exactly one trainer of TRL."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError([f"{command.origin}: is not valid Python: {error}"]) from error
    script = _Script(tree)
    trainers = [call for call in script.calls if script.name_of(call.func).endswith("Trainer")]
    if len(trainers) != 1:
        raise ConfigError(
            [f"{command.origin}: it has {len(trainers)} calls of a trainer of TRL, such as GRPOTrainer(...), not one"]
        )
    program = script.name_of(trainers[0].func).removesuffix("Trainer")
    command.program = program.lower()
    for call in script.calls:
        if script.name_of(call.func) == f"{program}Config":
            for argument in call.keywords:
                _add(command, script, argument.arg or "**", argument.value)
    _add_trainer(command, script, trainers[0])
    return command


class _Script:
    """A parsed script: its calls of names from TRL, and the expressions of variables that are assigned once."""

    def __init__(self, tree: ast.Module):
        nodes = list(ast.walk(tree))
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        self.modules = {name.asname or name.name: each.module or "" for each in imports for name in each.names}
        assigned = [node for node in nodes if isinstance(node, ast.Assign) and len(node.targets) == 1]
        names = [node.targets[0].id for node in assigned if isinstance(node.targets[0], ast.Name)]
        self._values = {
            name.id: node.value
            for node in assigned
            if isinstance(name := node.targets[0], ast.Name) and names.count(name.id) == 1
        }
        self.calls = [node for node in nodes if isinstance(node, ast.Call) and self._is_of_trl(node.func)]

    def _is_of_trl(self, function: ast.expr) -> bool:
        text = ast.unparse(function)
        return text.startswith("trl.") or self.modules.get(text, "").partition(".")[0] == "trl"

    @staticmethod
    def name_of(function: ast.expr) -> str:
        """Return the last part of a dotted name."""
        return ast.unparse(function).rpartition(".")[2]

    def expression(self, node: ast.expr) -> ast.expr:
        """Return the expression of a variable; other expressions unchanged."""
        return self._values.get(node.id, node) if isinstance(node, ast.Name) else node

    def literal(self, node: ast.expr) -> Any:
        """Return the value of a literal or of a variable with one. Raises ValueError for others."""
        return ast.literal_eval(self.expression(node))


def _add(command: Command, script: _Script, name: str, node: ast.expr) -> None:
    try:
        command.settings[name] = script.literal(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        command.unknown[f"{name}={ast.unparse(node)}"] = COMPUTED


def _add_trainer(command: Command, script: _Script, call: ast.Call) -> None:
    for name, node in ((each.arg or "**", each.value) for each in call.keywords):
        if name == "model":
            _add(command, script, MODEL, node)
        elif name == REWARDS:
            _add_rewards(command, script, node)
        elif name == "train_dataset":
            _add_dataset(command, script, node)
        elif name == "peft_config":
            command.settings["use_peft"] = ast.unparse(node) != "None"
        elif name not in WITHOUT_MEANING:
            _add(command, script, name, node)
    if MODEL not in command.settings and not any(each.startswith(f"{MODEL}=") for each in command.unknown):
        command.unknown[f"{MODEL}={', '.join(map(ast.unparse, call.args[:1]))}"] = COMPUTED


def _add_rewards(command: Command, script: _Script, node: ast.expr) -> None:
    """Add reward functions by name, with their module if they are imported, and the reward model."""
    node = script.expression(node)
    names = []
    for each in node.elts if isinstance(node, ast.List | ast.Tuple) else [node]:
        name = ast.unparse(each)
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            command.settings["reward_model_name_or_path"] = each.value
        elif script.modules.get(name, "trl").partition(".")[0] == "trl":
            names.append(script.name_of(each))
        else:
            names.append(f"{script.modules[name]}.{name}")
    if names:
        command.settings[REWARDS] = names


def _add_dataset(command: Command, script: _Script, node: ast.expr) -> None:
    """Add the dataset of a plain `load_dataset(NAME, split=SPLIT)`."""
    found = script.expression(node)
    options = {each.arg: each.value for each in found.keywords} if isinstance(found, ast.Call) else {}
    is_plain = (
        isinstance(found, ast.Call)
        and script.name_of(found.func) == "load_dataset"
        and len(found.args) == 1
        and {*options} <= {"split"}
    )
    _add(command, script, "dataset_name", found.args[0] if is_plain else node)
    if is_plain and "split" in options:
        _add(command, script, "dataset_train_split", options["split"])
