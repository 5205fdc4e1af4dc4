"""Collect facts for the checks from disk, hub and machine: missing files, model limits, devices.

User errors are recorded, not raised. None means unknown; the check is then skipped.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlfuse.config import custom_functions
from rlfuse.config.declare import names_function
from rlfuse.config.estimators import Traits
from rlfuse.config.rewards import names_code, read_entries
from rlfuse.config.schema import Config
from rlfuse.errors import ConfigError

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_USED = ("num_experts_per_tok", "moe_topk", "moe_k")
OPTIONAL_LOGGERS = ("tensorboard", "mlflow")


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about the machine and the files that a configuration names."""

    context_length: int | None = None
    """Context length of the model (max_position_embeddings)."""
    attention_heads: int | None = None
    layers: int | None = None
    vocabulary: int | None = None
    experts: bool | None = None
    video: bool = False
    model_problems: dict[str, str] = field(default_factory=dict)
    """Key (`model.path`, ...) -> why its model can't be read."""
    estimator: Traits | None = None
    function_problems: tuple[str, ...] = ()
    missing: frozenset[str] = frozenset()
    """Missing paths, as written in the configuration."""
    unknown_modules: frozenset[str] = frozenset()
    """Top-level packages of reward functions that Python can't find."""
    cuda: bool | None = None
    gpus: int | None = None
    """Number of GPUs of this machine, if the job runs on it."""
    unwritable: str | None = None
    missing_loggers: frozenset[str] = frozenset()
    """Optional packages of trainer.logger that are not installed."""
    wandb: str | None = None


def read_facts(config: Config) -> Facts:
    """Collect the facts about the files, models and devices of `config`."""
    _from_hub.cache_clear()  # in a notebook, the hub may have become reachable
    problems: dict[str, str] = {}
    model = _model_config(config.model.path, "model.path", problems, config.model.trust_remote_code)
    for key, path in (
        ("critic.path", config.critic.path),
        ("ref.path", config.ref.path),
        ("reward.model_path", config.reward.model_path),
    ):
        if path is not None and path != config.model.path:
            _folder_problem(path, key, problems, tokenizer=key != "reward.model_path")
            if is_hub_name(path) and isinstance(found := _from_hub(path), str):
                problems[key] = found
    return Facts(
        **_model_facts(model),
        model_problems=problems,
        **_function_facts(config),
        missing=_missing([*_named_paths(config), *_reward_files(config)]),
        cuda=on_gpus(config),
        gpus=_gpus(config),
        unwritable=_unwritable(Path(config.trainer.default_local_dir, config.trainer.project_name).absolute()),
        missing_loggers=frozenset(name for name in OPTIONAL_LOGGERS if not _is_installed(name)),
        wandb=_wandb_problem() if "wandb" in config.trainer.logger and config.trainer.wandb_mode == "online" else None,
    )


def _is_installed(package: str) -> bool:
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None  # without it, a folder of that name


def _wandb_problem() -> str | None:
    from wandb.errors import Error
    from wandb.sdk import wandb_setup
    from wandb.sdk.lib import wbauth

    token = os.environ.get("WANDB_IDENTITY_TOKEN_FILE")
    if token and not os.path.isfile(token):
        return f"WANDB_IDENTITY_TOKEN_FILE={token} does not exist"
    try:
        host = wandb_setup.singleton().settings.base_url
        found = wbauth.authenticate_session(host=host, source="rlfuse", prompt=False, update_session=False)
    except (Error, ValueError) as error:  # malformed key or address
        return " ".join(str(error).split()).rstrip(".")
    return None if found else f"wandb has no API key for {host}"


def _function_facts(config: Config) -> dict[str, Any]:
    custom_functions.clear_cache()  # in a notebook, the files may have changed
    problems, found, rewards = [], {}, reward_functions(config)
    in_files = [each for each in rewards if names_function(each) and custom_functions.split_reference(each)[0].exists()]
    named = [*custom_functions.custom_functions_of(config), *((custom_functions.REWARDS, each) for each in in_files)]
    for key, value in named:
        try:
            found[key] = custom_functions.read(key, value, custom_functions.arguments_of(config, key, value))
        except ConfigError as error:
            problems += error.problems
    problems += custom_functions.unused_arguments(config)
    names = [value.rpartition(":")[2] for value in config.trainer.metrics]
    problems += [f"{custom_functions.METRICS}: two functions are named {name}, their name in logs; rename one"
                 for name in dict.fromkeys(names) if names.count(name) > 1]  # fmt: skip
    return {
        "estimator": found.get("algorithm.adv_estimator"),
        "function_problems": tuple(dict.fromkeys(problems)),
        "unknown_modules": frozenset(_unknown_modules(rewards)),
    }


def on_gpus(config: Config) -> bool | None:
    """Return whether workers will have GPUs; None if unknown on this machine."""
    gpus = _gpus(config)
    return {"cpu": False, "cuda": True}.get(config.cluster.device, None if gpus is None else gpus > 0)


def _gpus(config: Config) -> int | None:
    """Return the number of GPUs of this machine; None if the job runs on another cluster."""
    return None if config.cluster.ray_address else len([*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("dxg")])


def planning_facts(config: Config) -> Facts:
    """Return the facts that planning needs: from the policy's config.json and custom files, without the data."""
    problems: dict[str, str] = {}
    model = _model_config(config.model.path, "model.path", problems, config.model.trust_remote_code, tokenizer=False)
    functions = _function_facts(config) | {"unknown_modules": frozenset()}
    return Facts(**_model_facts(model), model_problems=problems, **functions)


def missing_for_run(config: Config) -> list[str]:
    """Return the data files, reward files and reward packages of the job that are missing on this machine."""
    missing = _missing(paths := [*_data_paths(config), *_reward_files(config)])
    packages = (f"the package {name}" for name in _unknown_modules(reward_functions(config)))
    return [*dict.fromkeys(path for path in paths if path in missing), *packages]


def _model_facts(model: dict) -> dict[str, Any]:
    text = {**model, **(model.get("text_config") or {})}
    return {
        "context_length": text.get("max_position_embeddings"),
        "attention_heads": text.get("num_attention_heads"),
        "layers": text.get("num_hidden_layers"),
        "vocabulary": text.get("vocab_size"),
        "experts": any(text.get(name) for name in EXPERTS) if model else None,
        "video": "vision_config" in model,
    }


def reward_file(function: str) -> str | None:
    """Return the file of `path/file.py:function`; None for `package.module:function`."""
    source = function.rpartition(":")[0] or function
    return source if source.endswith(".py") or "/" in source else None


def reward_functions(config: Config) -> list[str]:
    """Return the paths of the reward functions that run on this machine."""
    entries, _ = read_entries(config.reward.functions)
    paths = [entry.path for entry in entries if names_code(entry.path)]
    return [path for path in paths if isinstance(path, str)]


def _named_paths(config: Config) -> list[str]:
    paths = _data_paths(config)
    if config.trainer.resume_mode not in ("auto", "disable"):
        paths.append(config.trainer.resume_mode)
    return paths


def _data_paths(config: Config) -> list[str]:
    data = config.data
    return [*data.train_files, *data.val_files, *([] if data.media_root is None else [data.media_root])]


def _reward_files(config: Config) -> list[str]:
    return [file for file in map(reward_file, reward_functions(config)) if file is not None]


def _missing(paths: list[str]) -> frozenset[str]:
    return frozenset(path for path in paths if not os.path.exists(os.path.expanduser(path)))


def _unknown_modules(functions: list[str]) -> list[str]:
    packages = {f.partition(":")[0].split(".")[0] for f in functions if reward_file(f) is None and ":" in f}
    return [name for name in packages if name.isidentifier() and importlib.util.find_spec(name) is None]


def is_hub_name(path: str) -> bool:
    """Return whether a model is named by its name on the hub, not by a folder."""
    return not path.startswith((".", "/", "~")) and path.count("/") <= 1 and not os.path.exists(path)


def _folder_problem(path: str, key: str, problems: dict[str, str], tokenizer: bool = True) -> Path | None:
    if not path or is_hub_name(path):
        return None
    folder = Path(os.path.expanduser(path))
    if not os.path.isdir(folder):
        problems[key] = "the folder does not exist"
    elif not (folder / "config.json").is_file():
        problems[key] = "the folder has no config.json"
    elif any(folder.glob("*.bin")) and not any(folder.glob("*.safetensors")):
        problems[key] = (
            "its weights are pickled (*.bin), which can execute code when loaded; convert them once with transformers, "
            "from_pretrained(folder).save_pretrained(other), and use the new folder"
        )
    elif tokenizer and not any((folder / n).is_file() for n in TOKENIZER_FILES):
        problems[key] = f"the folder has no tokenizer (one of {', '.join(TOKENIZER_FILES)})"
    return folder if key not in problems else None


HUB_S = 10.0
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def _model_config(
    path: str, key: str, problems: dict[str, str], trust_remote_code: bool, tokenizer: bool = True
) -> dict:
    folder = _folder_problem(path, key, problems, tokenizer)
    if not path or key in problems:
        return {}
    if folder is not None:
        # Importing transformers takes 3 to 8 s, so the file is read directly where that is enough.
        try:
            raw = json.loads((folder / "config.json").read_text())
            if not isinstance(raw, dict):
                raise ValueError(f"a {type(raw).__name__}, not an object")
        except (ValueError, RecursionError) as error:
            problems[key] = f"its config.json is not JSON ({error})"
            return {}
    elif isinstance(found := _from_hub(path), str):
        problems[key] = found
        return {}
    else:
        folder, raw = found.parent, json.loads(found.read_text())
    if "max_position_embeddings" in {**raw, **(raw.get("text_config") or {})}:
        return raw
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code).to_dict()
    except (OSError, ValueError, KeyError) as error:
        problems[key] = f"the folder: {str(error).strip().splitlines()[0]}"
        return {}


@functools.cache
def _from_hub(name: str) -> Path | str:
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str) and any(Path(cached).parent.glob("*.safetensors")):
            return Path(cached)
        HfApi().model_info(name, timeout=HUB_S)  # fails at once, whereas a download retries for half a minute
        return Path(hf_hub_download(name, "config.json", etag_timeout=HUB_S))
    except OfflineModeIsEnabled:
        return "is not a folder, and HF_HUB_OFFLINE=1 disables the hub"
    except Exception as error:  # its HTTP errors have no common base class
        return (
            f"is not a folder, and the hub has no such model or can't be reached ({' '.join(str(error).split())[:300]})"
        )


def _unwritable(folder: Path) -> str | None:
    """Return why a folder can't be created or written, or None; tries it, since permissions alone are not
    conclusive."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryDirectory(dir=there, prefix=".rlfuse-"):
            return None
    except OSError as error:
        return f"{there} is not writable ({error.strerror})"
