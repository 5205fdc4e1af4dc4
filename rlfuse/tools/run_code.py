"""List custom code that the configuration of a run folder names; commands run it only with --run-code."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlfuse.config.custom_functions import FAMILY, HEAD
from rlfuse.config.declare import names_function
from rlfuse.config.rewards import JUDGE, is_model
from rlfuse.errors import RunError

SHIPPED = re.compile(r"rlfuse\.(tasks|rewards\.verifiers)(\.[a-z]\w*)+")


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add the option --run-code to the parser of a command that reads a run folder."""
    parser.add_argument("--run-code", action="store_true", help="run the code that the folder's config.yaml names")


def refuse_code(file: Path, named: Iterable[str], run_code: bool) -> None:
    """Raise RunError if there is code and `run_code` is False."""
    if (named := list(named)) and not run_code:
        raise RunError(
            f"{file}: this command would run code that the file names: {', '.join(named)}. Add --run-code (in Python "
            "run_code=True) if you trust the folder, or set these keys yourself."
        )


def policy_code(policy: str) -> list[str]:
    """Return the setting by which a fusion policy runs custom code."""
    return [f"fusion.policy={policy}"] if names_function(policy) else []


def model_code(config: Mapping[str, Any]) -> list[str]:
    """Return the settings by which loading the model runs custom code."""
    model, more = config.get("model") or {}, (config.get("rollout") or {}).get("engine_kwargs")
    found = ["model.trust_remote_code=true"] if model.get("trust_remote_code") else []
    found += [f"{FAMILY}={model['video_family']}"] if model.get("video_family") else []
    return found + ([f"rollout.engine_kwargs={more}"] if more else [])


def reward_code(config: Mapping[str, Any]) -> list[str]:
    """Return the settings by which scoring runs custom code or sends samples to services."""
    reward, trusts = config.get("reward") or {}, (config.get("model") or {}).get("trust_remote_code")
    found = []
    for each in reward.get("functions") or []:
        path, kwargs = (each.get("path"), each.get("kwargs")) if isinstance(each, Mapping) else (each, None)
        is_safe = is_model(path) or (path == JUDGE and not {"engine_kwargs", "trust_remote_code"} & {*(kwargs or {})})
        if not (is_safe or (not kwargs and _is_shipped(path))):
            found.append(f"reward.functions=[{path}]")
    if reward.get("model_head"):
        found.append(f"{HEAD}={reward['model_head']}")
    if reward.get("model_path") and trusts:
        found.append(f"model.trust_remote_code=true for reward.model_path={reward['model_path']}")
    return found + ([f"reward.engine_kwargs={reward['engine_kwargs']}"] if reward.get("engine_kwargs") else [])


def _is_shipped(path: Any) -> bool:
    module, _, name = str(path).partition(":")
    if not SHIPPED.fullmatch(module):
        return False
    try:
        return getattr(getattr(importlib.import_module(module), name, None), "__module__", None) == module
    except ImportError:
        return False
