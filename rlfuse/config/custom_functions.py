"""Read custom functions and video models, `path/file.py:name`, from the file's syntax tree without executing it.

A file is read once, until `clear_cache`, so edits during a run do not change its traits. Problems are `ConfigError`s.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import operator
from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rlfuse.config.declare import CUSTOM, as_typed, declared, did_you_mean, names_function
from rlfuse.config.estimators import ESTIMATORS, Traits
from rlfuse.config.policy_losses import BUILT_IN, LossTraits
from rlfuse.config.policy_losses import DECORATOR as LOSS_DECORATOR
from rlfuse.config.rewards import map_judge_paths
from rlfuse.errors import ConfigError

DECORATOR = "advantage_estimator"
_TRAITS: Mapping[str, tuple[str, type[Traits] | type[LossTraits]]] = {
    "algorithm.adv_estimator": (DECORATOR, Traits),
    "actor.loss_mode": (LOSS_DECORATOR, LossTraits),
}
"""Key of a function with traits -> its decorator, and the class of its traits."""
_OF_KL = ("log_probs", "ref_log_probs")
PARAMETERS = {
    "algorithm.adv_estimator": ("token_rewards", "scores", "mask", "groups", "values", "baselines", "old_log_probs",
                                "ref_log_probs", "dimensions", "weights", "gamma", "lam", "by_std", "n"),
    "algorithm.kl_penalty": _OF_KL,
    "actor.loss_mode": ("log_probs", "old_log_probs", "advantages", "mask", "clip_low", "clip_high", "clip_c",
                        "tau_pos", "tau_neg", "ppo_kl_coef"),
    "actor.kl_loss_type": _OF_KL,
}  # fmt: skip
"""Key of a custom algorithm function -> names of the arguments that it may take."""
FAMILY = "model.video_family"
SAMPLER = "data.sampler"
HEAD = "reward.model_head"
CLASSES = FAMILY, SAMPLER, HEAD
"""Keys that name a class."""
METRICS = "trainer.metrics"
POLICY = "fusion.policy"
REWARDS = "reward.functions"
_ARGUMENT = {POLICY: "snapshot", METRICS: "list of samples"}
"""Key whose function is called with one argument -> description of the argument."""
ARGUMENTS = {key: f"{key}_kwargs" for key in (*PARAMETERS, POLICY, METRICS, SAMPLER, HEAD)}
"""Key of a custom function -> key of its additional arguments; those of METRICS are by the function's name."""
_TRAIT_OF = {
    "values": "needs_critic",
    "baselines": "needs_baseline",
    "old_log_probs": "needs_reference",
    "ref_log_probs": "needs_reference",
    "dimensions": "each_reward",
    "weights": "each_reward",
}
"""Parameter -> trait of the estimators that receive it."""


def traits_of(estimator: str) -> Traits:
    """Return the traits of an estimator, or default traits for an unknown name. Raises ConfigError for invalid
    files."""
    if names_function(estimator):
        return read("algorithm.adv_estimator", estimator)
    return ESTIMATORS.get(estimator, Traits())


def loss_traits_of(loss_mode: str) -> LossTraits:
    """Return the traits of a policy loss. Raises ConfigError for invalid files."""
    return read("actor.loss_mode", loss_mode) if names_function(loss_mode) else BUILT_IN


def split_reference(value: str) -> tuple[Path, str]:
    """Return the absolute path and the name of `path/file.py:name`."""
    file, _, name = value.rpartition(":")
    return Path(file).expanduser().absolute(), name


def absolute(key: str, value: str) -> str:
    """Return `value` with an absolute path, because workers may have another working directory."""
    return "{}:{}".format(*split_reference(value))


def map_functions(config: Any, place: Callable[[str, str], str]) -> Any:
    """Return the job with `place(key, function)` applied to each custom function except rewards."""
    chosen = {key.name: operator.attrgetter(key.name)(config) for key in declared(type(config)) if key.custom}
    moved: dict[str, Any] = {key: place(key, value) for key, value in chosen.items() if names_function(value)}
    return with_values(config, {**moved, METRICS: [place(METRICS, each) for each in config.trainer.metrics]})


def custom_functions_of(config: Any) -> list[tuple[str, str]]:
    """Return (key, function or class) for each custom one of a job, except rewards."""
    found = []
    for key in (key for key in declared(type(config)) if key.custom):
        value = operator.attrgetter(key.name)(config)
        given = value if isinstance(value, list) else [value]
        found += [(key.name, each) for each in given if each and (names_function(each) or not key.choices)]
    return found


def map_model_paths(config: Any, place: Callable[[str | None], str | None]) -> Any:
    """Return the job with `place(path)` applied to each model, including reward models and judges."""
    models = ("model.path", "critic.path", "ref.path", "reward.model_path")
    moved: dict[str, Any] = {key: place(operator.attrgetter(key)(config)) for key in models}
    return with_values(config, {**moved, REWARDS: map_judge_paths(config.reward.functions, place)})


def with_values(config: Any, values: Mapping[str, Any]) -> Any:
    """Return the job with new values of keys of the form GROUP.KEY."""
    for key, value in values.items():
        group, _, name = key.partition(".")
        config = dataclasses.replace(config, **{group: dataclasses.replace(getattr(config, group), **{name: value})})
    return config


def arguments_of(config: Any, key: str, value: str) -> Mapping[str, Any]:
    """Return the additional arguments that a job passes to the custom function `value` of a key."""
    if key not in ARGUMENTS:
        return {}
    found = operator.attrgetter(ARGUMENTS[key])(config)
    return found.get(value.rpartition(":")[2], {}) if key == METRICS else found


def unused_arguments(config: Any) -> list[str]:
    """Return a problem for each key with arguments of a function that the job does not have."""
    found = {key: operator.attrgetter(key)(config) for key in ARGUMENTS if key != METRICS}
    problems = [
        f"{ARGUMENTS[key]}={kwargs}: {key}={as_typed(value)} takes no arguments; remove them"
        for key, value in found.items()
        if (kwargs := operator.attrgetter(ARGUMENTS[key])(config)) and not names_function(value or "")
    ]
    names = {value.rpartition(":")[2] for value in config.trainer.metrics}
    return problems + [
        f"{ARGUMENTS[METRICS]}.{name}: {METRICS} has no function `{name}`; its functions: "
        f"{', '.join(sorted(names)) or 'none'}"
        for name in config.trainer.metrics_kwargs
        if name not in names
    ]


def clear_cache() -> None:
    """Forget all files that were read, since they may have changed."""
    _definition.cache_clear()
    _check_signature.cache_clear()


def read(key: str, value: str, arguments: Collection[str] | None = None) -> Any:
    """Return the traits of the function that a key names, None if it has none. Raises ConfigError for an invalid one.

    `arguments`: names of its additional arguments; None: whether all parameters are passed is not checked.
    """
    if not names_function(value):
        raise _problem(key, value, f"does not name a {_kind(key)} in a file", f"write {CUSTOM}")
    function = _definition(key, value, *split_reference(value))
    names = None if arguments is None else tuple(arguments)
    return _default_traits(key) if function is None else _check_signature(key, value, function, names)


@cache
def _definition(key: str, value: str, path: Path, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Return the definition of a function; None for a class, and for one that is checked when it is loaded."""
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except OSError:
        raise _problem(key, value, f"the file {path} does not exist", "correct the path") from None
    except (SyntaxError, ValueError) as error:
        where = f"syntax error in line {error.lineno}: " if isinstance(error, SyntaxError) else ""
        raise _problem(key, value, f"{where}{getattr(error, 'msg', error)}", "correct the file") from error
    kind, nodes = _kind(key), ast.ClassDef if key in CLASSES else ast.FunctionDef | ast.AsyncFunctionDef
    found = {node.name: node for node in tree.body if isinstance(node, nodes)}
    # Rewards, and policies that are not defined by `def`, are checked when they are loaded.
    loaded = key == REWARDS or (key == POLICY and name not in found)
    loaded = loaded and not _bound(tree).isdisjoint({name, "*"})
    if name not in found and not loaded:
        known = ", ".join(each for each in found if not each.startswith("_")) or "none"
        several = "classes" if key in CLASSES else "functions"
        raise _problem(key, value, f"the file has no {kind} `{name}`; its {several}: {known}", "name one of them")
    # Except for rewards: their files may extend sys.path, and they are executed at startup anyway.
    absent = [each for each in _imported(tree) if key != REWARDS and not _is_importable(each, path.resolve().parent)]
    if absent:
        raise _problem(key, value, f"Python does not find the package `{absent[0]}`", "install it, or correct the file")
    return None if loaded or key in CLASSES else found[name]


@cache
def _check_signature(
    key: str, value: str, function: ast.FunctionDef | ast.AsyncFunctionDef, names: tuple[str, ...] | None
) -> Any:
    if isinstance(function, ast.AsyncFunctionDef):
        raise _problem(key, value, "the function is async", "make it a plain `def`")
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    first = [each.arg for each in positional[: len(positional) - len(arguments.defaults)]]
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    by_name = [each.arg for each, default in pairs if default is None]
    only_by_position = {each.arg for each in arguments.posonlyargs}
    for name in names or ():
        accepted = {each.arg for each in [*positional, *arguments.kwonlyargs]} - only_by_position
        if name in PARAMETERS.get(key, ()) or (name not in accepted and not arguments.kwarg):
            taken = [each for each in accepted if each not in PARAMETERS.get(key, ())]
            why = "rlfuse passes it" if name in accepted else f"{value} has no parameter of this name"
            remedy = did_you_mean(name, taken) or "; remove it"
            raise ConfigError([f"{ARGUMENTS[key]}: `{name}`: {why}{remedy}"])
    if argument := _ARGUMENT.get(key):
        others = {*first[1:], *by_name} - {*(names or ())}
        if not (positional or arguments.vararg) or (others and names is not None):
            takes = f"takes ({ast.unparse(arguments)}) instead of one {argument}"
            remedy = f"correct it to `def {function.name}({argument.split()[-1]})`, or set {ARGUMENTS[key]}"
            raise _problem(key, value, takes, remedy)
        return None
    given, needed = PARAMETERS[key], first + by_name
    passed = {*given, *needed} if names is None else {*given, *names}
    if unknown := [each for each in needed if each not in passed - only_by_position]:
        wrong = f"its parameter `{unknown[0]}` is not one of {', '.join(given)}, which are passed by name"
        raise _problem(key, value, wrong, f"rename it, give it a default, or set {ARGUMENTS[key]}.{unknown[0]}")
    try:
        traits = _declared_traits(key, function)
    except (TypeError, ValueError) as error:
        decorator, kind = _TRAITS[key]
        reason = str(error).removeprefix(f"{kind.__name__}.__init__() ")
        literals = "True or False" if kind is LossTraits else "True, False or a string"
        valid = f"traits are {', '.join(kind.__dataclass_fields__)}, with the literal values {literals}"
        raise _problem(key, value, f"@{decorator}: {reason}; {valid}", "correct it") from error
    for parameter, trait in _TRAIT_OF.items() if key == "algorithm.adv_estimator" else ():
        if parameter in needed and not getattr(traits, trait):
            wrong = f"its parameter `{parameter}` is only passed to estimators with {trait}=True"
            raise _problem(key, value, wrong, f"put @{DECORATOR}({trait}=True) above it")
    return traits


def _default_traits(key: str) -> Any:
    return _TRAITS[key][1]() if key in _TRAITS else None


def _declared_traits(key: str, function: ast.FunctionDef) -> Any:
    if key not in _TRAITS:
        return None
    decorator, kind = _TRAITS[key]
    for each in function.decorator_list:
        named = each.func if isinstance(each, ast.Call) else each
        if getattr(named, "attr", getattr(named, "id", None)) != decorator:
            continue
        if not isinstance(each, ast.Call) or each.args:
            example = "zero_without_advantage" if kind is LossTraits else "needs_groups"
            raise ValueError(f"pass traits by name, as in @{decorator}({example}=True)")
        return kind(**{str(keyword.arg): ast.literal_eval(keyword.value) for keyword in each.keywords})
    return kind()


def _imported(tree: ast.Module) -> list[str]:
    found: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            found += [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module.split(".")[0])
    return found


def _kind(key: str) -> str:
    return "class" if key in CLASSES else "function"


def _bound(tree: ast.Module) -> set[str]:
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    found |= {node.name for node in ast.walk(tree) if isinstance(node, definitions)}
    return found | {each.asname or each.name for node in ast.walk(tree) for each in getattr(node, "names", ())
                    if isinstance(each, ast.alias)}  # fmt: skip


def _is_importable(package: str, folder: Path) -> bool:
    is_neighbour = (folder / f"{package}.py").exists() or (folder / package).is_dir()
    return is_neighbour or importlib.util.find_spec(package) is not None


def _problem(key: str, value: str, valid: str, remedy: str) -> ConfigError:
    return ConfigError([f"{key}={value}: {valid}; {remedy}"])
