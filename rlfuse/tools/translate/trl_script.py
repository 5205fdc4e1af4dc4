"""Read a Python script that calls one trainer of TRL: the arguments of its trainer and config. Pure; never runs it.

An argument is read only where the script cannot change it; all others are unknown settings with the reason.
"""

from __future__ import annotations

import ast

from rlfuse.errors import ConfigError
from rlfuse.tools.translate.arguments import Command
from rlfuse.tools.translate.bindings import Bindings, last_name

COMPUTED = "the script computes the value"
CONFIG = (
    "the script computes the config (if from flags, translate the command that sets them); keys with the comment "
    "`TRL's default` may have other values"
)
MODEL, REWARDS, REWARD_MODEL = "model_name_or_path", "reward_funcs", "reward_model_name_or_path"
WITHOUT_MEANING = {"args", "eval_dataset", "compute_metrics", "preprocess_logits_for_metrics"}
"""Arguments of a trainer that do not change what is trained, or that are read separately."""
SHOWN = 80
"""Characters of an expression that are shown."""
LOADING = {"padding_side", "trust_remote_code", "use_fast", "cache_dir", "token", "local_files_only"}
"""Arguments of from_pretrained that do not change a tokenizer."""
PADDING = {"pad_token", "pad_token_id", "padding_side"}
"""Attributes of a tokenizer that do not change what is trained."""


def read_script(command: Command, text: str) -> Command:
    """Add the settings of a script. Raises ConfigError unless it calls exactly one trainer, which is one of TRL."""
    try:
        script = Bindings(ast.parse(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError([f"{command.origin}: is not valid Python: {error}"]) from error
    trainers = [call for call in script.calls if _is_trainer(script, call.func)]
    origins = [script.origin(call.func) for call in trainers]
    if len(trainers) != 1 or not origins[0].startswith("trl."):
        count = len(trainers) if len(trainers) > 1 else 0
        raise ConfigError(
            [f"{command.origin}: it has {count} calls of a trainer of TRL, such as GRPOTrainer(...), not one"]
        )
    program = origins[0].rpartition(".")[2].removesuffix("Trainer")
    command.program = program.lower()
    options = {each.arg or "**": each.value for each in trainers[0].keywords}
    _add_config(command, script, program, options.get("args"))
    _add_trainer(command, script, trainers[0])
    _add_changes(command, script, trainers[0])
    command.environment |= _environment(script)
    return command


def _is_trainer(script: Bindings, function: ast.expr) -> bool:
    """Return whether a function is a trainer: by its imported name, or by that of its base classes."""
    name = last_name(function)
    bases = script.bases.get(name, []) if isinstance(function, ast.Name) else []
    return (script.origin(function) or name).endswith("Trainer") or any(
        (script.origin(base) or last_name(base)).endswith("Trainer") for base in bases
    )


def _add_config(command: Command, script: Bindings, program: str, node: ast.expr | None) -> None:
    """Add the arguments of the trainer's config."""
    if node is None or _is_none(node):
        return
    call = script.expression(node)
    origin = script.origin(call.func) if isinstance(call, ast.Call) else ""
    if not isinstance(call, ast.Call) or not (origin.startswith("trl.") and origin.endswith(f".{program}Config")):
        command.unknown[f"args={_shown(node)}"] = CONFIG
        return
    for number, value in enumerate(call.args):
        is_first = number == 0 and not isinstance(value, ast.Starred)
        _add(command, script, "output_dir" if is_first else "argument", value)
    for each in call.keywords:
        options = script.expression(each.value)
        if each.arg is not None:
            _add(command, script, each.arg, each.value)
        elif isinstance(options, ast.Dict):
            for key, value in zip(options.keys, options.values, strict=True):
                _add(command, script, str(key.value) if isinstance(key, ast.Constant) else "**", value)
        else:
            command.unknown[f"**={_shown(each.value)}"] = CONFIG


def _add(command: Command, script: Bindings, name: str, node: ast.expr) -> None:
    try:
        command.settings[name] = script.literal(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        command.unknown[f"{name}={_shown(node)}"] = COMPUTED


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _shown(node: ast.expr) -> str:
    try:
        text = ast.unparse(node)
    except RecursionError:
        return "..."
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _add_trainer(command: Command, script: Bindings, call: ast.Call) -> None:
    model = [each.value for each in call.keywords if each.arg == "model"] or call.args[:1]
    for node in model:
        _add(command, script, MODEL, node)
    for node in (each for number, each in enumerate(call.args) if number or isinstance(each, ast.Starred)):
        command.unknown[f"argument={_shown(node)}"] = "is not passed by name"
    for name, node in ((each.arg or "**", each.value) for each in call.keywords):
        if name == REWARDS:
            _add_rewards(command, script, node)
        elif name == "train_dataset":
            _add_dataset(command, script, node)
        elif name in ("processing_class", "tokenizer"):
            _add_tokenizer(command, script, node, *model)
        elif name == "peft_config":
            command.settings["use_peft"] = not _is_none(script.expression(node))
        elif name not in WITHOUT_MEANING | {"model"}:
            _add(command, script, name, node)
    if not model:
        command.unknown[f"{MODEL}=**"] = COMPUTED


def _add_changes(command: Command, script: Bindings, trainer: ast.Call) -> None:
    """Add what the script changes in the trainer, or in TRL, and the arguments of `train`."""
    for name in script.variables(trainer):
        for change in [*sorted(script.stored.get(name, [])), *script.receivers(name)]:
            command.unread[f"{change} of {name}"] = "changes the trainer after it is created"
    for name in script.stored:
        if script.origin(ast.Name(name)).partition(".")[0] == "trl":
            command.unread[f"{', '.join(sorted(script.stored[name]))} of {name}"] = "changes TRL"
    if script.is_imported("unsloth"):
        command.unread["import unsloth"] = "replaces the trainers of TRL and their defaults"
    if script.is_in_loop(trainer):
        command.unread["loop"] = "creates several trainers"
    for call in script.calls:
        if last_name(call.func) == "train":
            for each in call.keywords:
                _add(command, script, each.arg or "**", each.value)
            for value in call.args:
                _add(command, script, "resume_from_checkpoint", value)


def _add_rewards(command: Command, script: Bindings, node: ast.expr) -> None:
    """Add imported reward functions by their modules, and the reward model."""
    node = script.expression(node)
    names: list[str] = []
    for each in node.elts if isinstance(node, ast.List | ast.Tuple) else [node]:
        value, origin = script.expression(each), script.origin(each)
        model = value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None
        if model is not None and REWARD_MODEL not in names:
            command.settings[REWARD_MODEL] = model
            names.append(REWARD_MODEL)
        elif origin and not origin.startswith("."):
            names.append(origin)
        else:
            is_local = isinstance(value, ast.Name | ast.Lambda)
            why = "is a second reward model" if model else "is defined in the script" if is_local else COMPUTED
            command.unknown[f"{REWARDS}={_shown(each)}"] = why
    if names:
        command.settings[REWARDS] = names


def _add_dataset(command: Command, script: Bindings, node: ast.expr) -> None:
    """Add the dataset of a plain `load_dataset(NAME, split=SPLIT)`."""
    found = script.expression(node)
    options = {each.arg: each.value for each in found.keywords} if isinstance(found, ast.Call) else {}
    if (
        isinstance(found, ast.Call)
        and script.origin(found.func) == "datasets.load_dataset"
        and len(found.args) == 1
        and {*options} <= {"split"}
    ):
        _add(command, script, "dataset_name", found.args[0])
        if "split" in options:
            _add(command, script, "dataset_train_split", options["split"])
    else:
        command.unknown[f"dataset_name={_shown(node)}"] = COMPUTED


def _add_tokenizer(command: Command, script: Bindings, node: ast.expr, *models: ast.expr) -> None:
    """Leave the model open unless the tokenizer is the model's."""
    value = script.assigned(node)
    options = {each.arg for each in value.keywords} if isinstance(value, ast.Call) else set()
    changes = script.stored.get(node.id, set()) if isinstance(node, ast.Name) else set()
    sources = {_source(script, each) for each in (node, *models)}
    is_of_model = options <= LOADING and changes <= PADDING and len(sources) == 1 and all(sources)
    if not _is_none(value) and not is_of_model:
        command.unknown[f"processing_class={_shown(node)}"] = "rlfuse uses the tokenizer of the model, unchanged"


def _source(script: Bindings, node: ast.expr) -> str:
    """Return the name of a model, or that from which a model or tokenizer is loaded; empty if it is unknown."""
    value = script.assigned(node)
    if isinstance(value, ast.Call) and last_name(value.func) == "from_pretrained" and value.args:
        value = script.assigned(value.args[0])
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def _environment(script: Bindings) -> dict[str, str]:
    """Return the environment variables that the script sets to literals."""
    found = {}
    for node in script.nodes:
        match node:
            case ast.Assign(
                targets=[ast.Subscript(value=where, slice=ast.Constant(value=str(name)))],
                value=ast.Constant(value=str(value)),
            ) if last_name(where) == "environ":
                found[name] = value
    return found
