"""Translate commands and config files of TRL 1.16 and its example scripts. Pure, except for reading `--config`.

TRL counts completions per device and optimizer steps; rlfuse counts prompts and training steps, each of which generates
one batch. `DEFAULTS` has every setting whose default differs from rlfuse's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlfuse.config.declare import as_typed
from rlfuse.config.documentation import by_name
from rlfuse.config.other_frameworks import TRL, keys_of
from rlfuse.errors import ConfigError
from rlfuse.parsing import parse_yaml
from rlfuse.tools.translate.arguments import Command
from rlfuse.tools.translate.job import Open, Translation
from rlfuse.tools.translate.shell import Word
from rlfuse.tools.translate.undecided import UNDECIDED

_SHARED: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "gradient_checkpointing": True,
    "save_strategy": "steps",
    "save_steps": 500,
    "save_total_limit": None,
    "eval_strategy": "no",
    "report_to": "none",
    "seed": 42,
}
_ONLINE = {
    "num_generations": 8,
    "max_completion_length": 512,
    "num_iterations": 1,
    "epsilon": 0.2,
    "epsilon_high": None,
    "temperature": 1.0,
    "beta": 0.0,
}
_SYNC = {"sync_ref_model": False, "ref_model_sync_steps": 512, "ref_model_mixup_alpha": 0.6}
DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": _SHARED
    | _ONLINE
    | _SYNC
    | {
        "loss_type": "dapo",
        "scale_rewards": "group",
        "importance_sampling_level": "token",
        "multi_objective_aggregation": "sum_then_normalize",
        "delta": None,
        "use_bias_correction_kl": True,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": 3.0,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
    },
    "rloo": _SHARED | _ONLINE | _SYNC | {"num_generations": 2, "beta": 0.05},
    "sft": _SHARED | {"learning_rate": 2e-5, "max_length": 1024, "loss_type": "nll"},
    "dpo": _SHARED | _SYNC | {"beta": 0.1, "max_length": 1024, "loss_type": ["sigmoid"]},
    "reward": _SHARED | {"learning_rate": 1e-4, "max_length": 1024},
}
"""Program -> TRL's defaults of the settings that the translation reads."""

TASKS = {"grpo": "rl", "rloo": "rl", "sft": "sft", "dpo": "dpo", "reward": "reward_model"}
LOSSES = {
    "grpo": ("vanilla", "seq-mean-token-mean"),
    "dapo": ("vanilla", "token-mean"),
    "dr_grpo": ("vanilla", "seq-mean-token-sum-norm"),
    "cispo": ("cispo", "token-mean"),
    "sapo": ("sapo", "seq-mean-token-mean"),
    "bnpo": ("vanilla", "bnpo"),
    "luspo": ("luspo", "seq-mean-token-sum"),
    "vespo": ("vespo", "token-mean"),
}
"""loss_type -> (actor.loss_mode, actor.loss_agg_mode)."""
TOKEN_MEAN = [name for name, (_, aggregation) in LOSSES.items() if aggregation == "token-mean"]
SCHEDULES = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine", "warmup_stable_decay": "wsd"}
DIRECT = {
    "trust_remote_code": "model.trust_remote_code",
    "seed": "data.seed",
    "full_determinism": "trainer.deterministic",
    **keys_of(
        TRL,
        "learning_rate weight_decay max_grad_norm per_device_train_batch_size gradient_checkpointing "
        "model_name_or_path save_total_limit output_dir run_name",
    ),
}
"""Settings that only have another name."""
DIRECT_ONLINE = {
    "num_generations_eval": "rollout.val_kwargs.n",
    "max_prompt_length": "data.max_prompt_length",
    "entropy_coef": "actor.entropy_coeff",
    "shuffle_dataset": "data.shuffle",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "rollout.tensor_model_parallel_size",
    **keys_of(
        TRL,
        "num_generations num_iterations max_completion_length temperature top_p min_p reward_weights "
        "chat_template_kwargs mask_truncated_completions",
    ),
}
GRPO = {"loss_type", "scale_rewards", "importance_sampling_level", "delta", "multi_objective_aggregation"}
"""Settings that only GRPO has, of those that generate."""
ONLINE = {"reward_funcs", "num_generations", "max_completion_length"}
COUNTS = ("num_generations", "num_iterations")
REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
UNKNOWN = {
    "dataset_name": ("data.train_files",),
    "dataset_train_split": ("data.train_files",),
    "reward_funcs": ("reward.functions",),
    "reward_model_name_or_path": ("reward.model_path",),
    "processing_class": ("model.path",),
    "num_generations": ("rollout.n", "data.train_batch_size", "actor.ppo_mini_batch_size"),
    **dict.fromkeys(
        ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size"),
        ("data.train_batch_size", "actor.ppo_mini_batch_size"),
    ),
}
"""Settings whose value may be missing in a script -> keys to decide."""
READ = {
    *("gradient_accumulation_steps", "steps_per_generation", "generation_batch_size", "num_train_epochs"),
    *("max_steps", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "beta", "epsilon"),
    *("epsilon_high", "delta", "loss_type", "scale_rewards", "importance_sampling_level"),
    *("multi_objective_aggregation", "top_k", "use_bias_correction_kl", "use_vllm", "dataset_name"),
    *("dataset_train_split", "dataset_test_split", "reward_funcs", "reward_model_name_or_path"),
    *("reward_model_path", "datasets", "save_strategy", "save_steps", "eval_strategy", "eval_steps", "report_to"),
    *("dtype", "torch_dtype", "bf16", "fp16", "deepspeed", "max_length", "completion_only_loss"),
    *("sapo_temperature_pos", "sapo_temperature_neg", "adam_beta1", "adam_beta2", "adam_epsilon", "project"),
    *("sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha", "vllm_importance_sampling_correction"),
    *("vllm_importance_sampling_mode", "vllm_importance_sampling_cap"),
    *("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"),
    *("assistant_only_loss", "accelerate_config", "config_file", "num_processes", "nproc_per_node"),
}
"""Settings that the functions below read together."""
WITHOUT_EFFECT = re.compile(
    r"log_|logging_|hub_|push_to_hub|trackio|wandb_|lora_|use_peft$|eval_|per_device_eval|do_|save_|dataloader|ddp_|fsdp"
    r"|num_(machines|processes|completions)|main_process|machine_rank|rdzv|nnodes|bf16_|fp16_|tf32|use_liger|liger_"
    r"|gradient_checkpointing_kwargs|attn_implementation|torch_compile|vllm_(mode|server|group|enable|max|model|device)"
    r"|use_transformers|cache_|use_cache|pad_|remove_unused|overwrite_output|output|include_|disable_tqdm|debug|ds3_|disable_dropout"
    r"|dataset_num_proc|local_rank|prediction_loss|load_best|metric_for|greater_is|activation_offloading|use_cpu"
    r"|local_rollout|num_sample_generations|dataset_streaming|ignore_(bias|data)|padding_free|cast_lm|shuffle_dataset"
    r"|precompute_ref|config$|sft_model_path|auto_find|skip_memory|data_seed|num_ppo_epochs|torch_empty|batch_eval"
    r"|enable_jit|restore_callback"
)
"""Names of TRL that do not change what is trained."""
PROGRAM = re.compile(r"(?:^|/)(?:trl|examples)/scripts/(?:\S*/)?(\w+)\.py$")
"""Scripts of TRL, which train by the settings alone, except for rewards and datasets that they define."""
CONFIGS = re.compile(r"(?:^|accelerate_configs/(?:deepspeed_)?)(zero[123]|fsdp[12]|multi_gpu|single_gpu)(?:\.yaml)?$")
"""Accelerate configs of TRL, which start 8 processes or one; other files may start another number."""
SHARDING = re.compile(r"zero_?([123])|fsdp[12]?(?:\.yaml)?(?: |$)")
"""Names of files that shard a model: FSDP as ZeRO 3 does."""


PYTHON = re.compile(r"(\S*/)?python[\d.]*|-\w+")


def program_at(words: Sequence[Word]) -> int | None:
    """Return the index of the word that names TRL's program or script, or None."""
    for at, word in enumerate(words):
        if word.text == "trl" and at + 1 < len(words) and re.fullmatch(r"[a-z_]+", words[at + 1].text):
            return None if words[at + 1].text in ("env", "vllm") else at + 1
        flags = [each.text.partition("=")[0] for each in words[at + 1 :]]
        if word.text.endswith(".py") and {"--model_name_or_path", "--config"} & {*flags}:
            return at
    return None


def read_words(command: Command, words: Sequence[Word]) -> None:
    """Read a command line of the TRL CLI, or one that launches a script."""
    at = program_at(words)
    name = words[at].text
    script = PROGRAM.search(name)
    launcher = Command("TRL", command.origin)
    launcher.read_flags([Word(word.text.replace("--nproc-per", "--nproc_per")) for word in words[:at]
                         if word.text.startswith("-") or not word.text.isalpha()])  # fmt: skip
    is_cli = not name.endswith(".py")
    command.program = name if is_cli else _program_of(script[1] if script else Path(name).stem)
    command.read_flags(words[at + 1 :])
    for theirs, name in (("config_file", "config_file"), ("deepspeed_config_file", "deepspeed")):
        if theirs in launcher.settings:
            command.settings[name] = launcher.settings[theirs]
    if not is_cli and script is None:
        command.unread[name] = "may change what its flags set; compare the script with this job"
    file = command.settings.pop("config", None)
    if file is not None:
        path = Path(str(file)).expanduser()
        if path.is_file():
            try:
                content = parse_yaml(path.read_text(encoding="utf-8"), OmegaConf.create)
            except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
                why = " ".join(str(error).split())[:300]
                raise ConfigError([f"--config {file}: can't be read as YAML ({why}); correct the file"]) from error
            inside = Command("TRL", command.origin)
            inside.read_tree(content if isinstance(content, DictConfig) else OmegaConf.create({}))
            command.settings = inside.settings | command.settings
            command.unknown |= inside.unknown
        else:
            command.unread[f"--config {file}"] = "the file does not exist here, so that its settings are unknown"
    is_unknown = any(each.startswith(("num_processes=", "nproc_per_node=", "nnodes=")) for each in launcher.unknown)
    command.processes = None if is_unknown else _processes(launcher.settings | command.settings)
    if not is_cli and all(PYTHON.fullmatch(word.text) for word in words[:at]):
        command.processes = 1


def read_config(command: Command, content: DictConfig) -> Command:
    """Read a config file of the TRL CLI, which does not name the program: its name or its settings may."""
    command.read_tree(content)
    programs = [name for name in TASKS if name in command.origin] or ["grpo"] * bool(GRPO & command.settings.keys())
    command.program = programs[0] if len(programs) == 1 else ""
    command.processes = _processes(command.settings)
    return command


def _program_of(script: str) -> str:
    for begin, program in (("gspo", "grpo"), ("rloo", "rloo"), ("reward", "reward")):
        if script.startswith(begin):
            return program
    return next((name for name in TASKS if script.startswith(name)), script)


def _processes(given: dict[str, Any]) -> int | None:
    nodes = given.get("nnodes", 1)
    if isinstance(given.get("num_processes"), int):
        return given["num_processes"]
    if isinstance(given.get("nproc_per_node"), int):
        return given["nproc_per_node"] * nodes if isinstance(nodes, int) else None
    found = CONFIGS.search(str(given.get("config_file") or given.get("accelerate_config") or ""))
    return None if found is None else 1 if found[1] == "single_gpu" else 8


def translate(command: Command) -> Translation:
    """Translate a TRL command to the equivalent job."""
    job = Translation("TRL")
    if command.program not in DEFAULTS:
        why = f"{command.program} is not translated" if command.program else "the file does not name the program"
        rows = [row.why for row in UNDECIDED["TRL"] if command.program in row.values]
        remedy = [] if command.program else ["run `rlfuse translate -- trl PROGRAM --config FILE`"]
        job.leave_open("trainer.task", "; ".join([why, *rows, *remedy]))
    return _Reader(job, command).read()


class _Reader:
    """Translates the settings of one command."""

    def __init__(self, job: Translation, command: Command):
        self.result, self.command, self.given = job, command, command.settings
        self.defaults = DEFAULTS.get(command.program, _SHARED)
        self.is_online = TASKS.get(command.program) == "rl" or bool(ONLINE & self.given.keys())

    def value(self, name: str) -> Any:
        """Return a setting or TRL's default; 1 for an unknown number of generations or iterations."""
        return self.command.value(name, self.defaults.get(name, 1 if name in COUNTS else None))

    def _is_unknown(self, name: str) -> bool:
        return any(setting.startswith(f"{name}=") for setting in self.command.unknown)

    def set(self, key: str, value: Any, *names: str) -> None:
        """Set a key from settings, with a comment that names them, or TRL's default."""
        given = [f"{name}={as_typed(self.given[name])}" for name in names if name in self.given]
        shown = ", ".join(given) or "TRL's default"
        self.result.set(key, value, shown, shown)

    def read(self) -> Translation:
        """Translate all settings of the command."""
        for name, key in (DIRECT | (DIRECT_ONLINE if self.is_online else {})).items():
            if name in self.given or name in self.defaults:
                self.set(key, self.value(name), name)
        self._task()
        self._batches()
        self._data()
        self._logging()
        if self.is_online:
            self._rewards()
            self._objective()
        self._others()
        return self.result

    def _task(self) -> None:
        task = TASKS.get(self.command.program)
        if task is not None and task != "rl":
            self.result.set("trainer.task", task, f"trl {self.command.program}", f"trl {self.command.program}")
        if self.command.program == "dpo":
            losses = self.value("loss_type")
            self.set("dpo.beta", self.value("beta"), "beta")
            one = losses[0] if isinstance(losses, list) and len(losses) == 1 else losses
            self.set("dpo.loss_type", one, "loss_type")
        if task not in (None, "rl"):
            self._split_length()
        if task == "sft" and self.value("loss_type") not in ("nll", "chunked_nll"):
            self.result.leave_open("trainer.task", f"loss_type={self.value('loss_type')}: rlfuse has no such loss")
        if task == "sft" and not self.given.get("completion_only_loss") and not self.given.get("assistant_only_loss"):
            self.result.leave_open(
                "trainer.task",
                "without completion_only_loss and assistant_only_loss TRL also trains on the prompts of conversations "
                "and on plain text; rlfuse trains on responses",
            )

    def _split_length(self) -> None:
        if self.given.get("max_length", 0) is None:
            for key in ("data.max_prompt_length", "data.max_response_length"):
                self.result.leave_open(key, "max_length=null: TRL has no limit")
            return
        length = self.value("max_length")
        for key, size in (("max_prompt_length", length // 2), ("max_response_length", length - length // 2)):
            self.result.set(f"data.{key}", size, "", f"the sum is max_length={length}")
        if self.command.program == "reward":
            self.result.set("data.filter_overlong_prompts", True, "", "TRL drops longer pairs")

    def _batches(self) -> None:
        """Set batch sizes in prompts (or rows), and lengths in training steps."""
        each = self.value("per_device_train_batch_size") * (self.command.processes or 1)
        update = each * self.value("gradient_accumulation_steps")
        steps = self.command.value("steps_per_generation", 0)
        batch = self.command.value("generation_batch_size", 0) or steps * each or update
        online = self.is_online
        rows = self.value("num_generations") or 1
        names = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation",
                 "generation_batch_size")  # fmt: skip
        sizes = {"data.train_batch_size": batch} | ({"actor.ppo_mini_batch_size": min(update, batch)} if online else {})
        for key, size in sizes.items():
            whole = size // rows if size % rows == 0 else Open(f"{size} samples are not whole groups of {rows}")
            self.set(key, whole, *names)
        if self.command.processes is None:
            self.result.leave_open(
                "trainer.n_gpus_per_node",
                "TRL starts a process per GPU of the machine; with more than one, also multiply data.train_batch_size "
                "(and actor.ppo_mini_batch_size) by their number",
            )
        else:
            self.result.set("trainer.n_gpus_per_node", self.command.processes, "", "the number of processes")
        updates = batch * (self.value("num_iterations") or 1) / max(update, 1)
        self._lengths(max(updates, 1))
        self._schedule(max(updates, 1))

    def _lengths(self, updates: float) -> None:
        """Set lengths that TRL counts in optimizer steps. `updates`: optimizer steps per training step."""
        steps, epochs = self.value("max_steps"), self.value("num_train_epochs")
        if steps > 0:
            self.set("trainer.total_training_steps", max(1, round(steps / updates)), "max_steps")
        elif float(epochs).is_integer():
            self.set("trainer.total_epochs", int(epochs), "num_train_epochs")
        else:
            self.set("trainer.total_epochs", Open("a part of an epoch; write total_training_steps"), "num_train_epochs")
        warmup, ratio = self.value("warmup_steps"), self.command.value("warmup_ratio", 0.0)
        if self.value("lr_scheduler_type") == "constant" and (warmup or ratio):
            self.result.note(
                "no effect with lr_scheduler_type=constant", f"warmup_steps={warmup}, warmup_ratio={ratio}"
            )
            warmup = ratio = 0
        if 0 < warmup < 1:
            ratio = warmup
        if ratio and warmup < 1:
            self.set("actor.optim.lr_warmup_steps_ratio", ratio, "warmup_ratio", "warmup_steps")
        elif warmup:
            self.set("actor.optim.lr_warmup_steps", max(1, round(warmup / updates)), "warmup_steps")
        is_saved, is_evaluated = (self.value(f"{kind}_strategy") == "steps" for kind in ("save", "eval"))
        saved = self._interval(self.value("save_steps"), updates) if is_saved else -1
        self.set("trainer.save_freq", saved, "save_strategy", "save_steps")
        every = self.command.value("eval_steps", 0) or self.command.value("logging_steps", 10)
        evaluated = self._interval(every, updates) if is_evaluated else -1
        self.set("trainer.test_freq", evaluated, "eval_strategy", "eval_steps", "logging_steps")
        if self.value("sync_ref_model") and _SYNC.keys() <= self.defaults.keys():
            self.set("ref.sync_ref_model", True, "sync_ref_model")
            steps = max(1, round(self.value("ref_model_sync_steps") / updates))
            self.set("ref.ref_model_sync_steps", steps, "ref_model_sync_steps")
            self.set("ref.ref_model_mixup_alpha", self.value("ref_model_mixup_alpha"), "ref_model_mixup_alpha")

    def _interval(self, steps: float, updates: float) -> int:
        """Return an interval in training steps; -1 for 0, and for a fraction of an unknown number of steps."""
        steps = steps * max(0, self.value("max_steps")) if steps < 1 else steps
        return max(1, round(steps / updates)) if steps > 0 else -1

    def _schedule(self, updates: float) -> None:
        name, options = self.value("lr_scheduler_type"), self.given.get("lr_scheduler_kwargs") or {}
        steps = options.get("num_decay_steps", 0) if isinstance(options, dict) else None
        if isinstance(steps, int) and {*options} <= {"min_lr_rate", "num_decay_steps"}:
            if "min_lr_rate" in options:
                self.set("actor.optim.min_lr_ratio", options["min_lr_rate"], "lr_scheduler_kwargs")
            if steps:
                self.set("actor.optim.lr_wsd_decay_steps", max(1, round(steps / updates)), "lr_scheduler_kwargs")
        elif options:
            self.result.leave_open("actor.optim.lr_scheduler_type", f"lr_scheduler_kwargs={options}: has no equal")
        self.set("actor.optim.lr_scheduler_type", SCHEDULES.get(name, name), "lr_scheduler_type")
        if {"adam_beta1", "adam_beta2"} & self.given.keys():
            betas = [float(self.command.value(f"adam_beta{n}", default)) for n, default in ((1, 0.9), (2, 0.999))]
            self.set("actor.optim.betas", betas, "adam_beta1", "adam_beta2")
        if "adam_epsilon" in self.given:
            self.set("actor.optim.eps", self.given["adam_epsilon"], "adam_epsilon")
        dtype = self.given.get("dtype") or self.given.get("torch_dtype")
        if self.given.get("fp16") or dtype in ("float16", "fp16"):
            self.result.leave_open("model.dtype", "float16 is not supported")
        elif self.given.get("bf16") is False and dtype in (None, "float32"):
            self.set("model.dtype", "float32", "bf16", "dtype", "torch_dtype")
        file = self.given.get("deepspeed")
        names = ("deepspeed", "config_file", "accelerate_config")
        stage = SHARDING.search(" ".join(str(self.given.get(name)) for name in names))
        if stage and self.command.processes != 1:
            self.set("actor.zero_stage", int(stage[1] or 3), *names)
        if file and not (isinstance(file, dict) and not {"optimizer", "scheduler"} & file.keys()):
            why = f"deepspeed={as_typed(file)}: may set another optimizer and schedule; they are not read"
            self.result.leave_open("actor.optim.lr_scheduler_type", why)

    def _data(self) -> None:
        name = self.given.get("dataset_name")
        split = self.given.get("dataset_train_split", "train")
        if self.given.get("datasets"):
            self.result.leave_open("data.train_files", "rlfuse reads files: download the datasets and list them")
        elif name is None and not self._is_unknown("dataset_name"):
            self.result.leave_open("data.train_files", "the command names no dataset, the script may load one")
        elif name is not None:
            part = "" if split == "train" else f", split {split}"
            self.result.set_files("data.train_files", "dataset_name", str(name), part, f"those of the split {split}")
        if self.is_online:
            self.result.set(
                "data.prompt_is_chat", False, "", "TRL's prompts are messages, or text that is used as it is"
            )
        if self.is_online and "max_prompt_length" in self.given:
            self.result.set("data.truncation", "left", "max_prompt_length", "as TRL truncates prompts")
        if self.value("eval_strategy") != "no":
            test = self.given.get("dataset_test_split", "test")
            self.result.note(
                f"set data.val_files to files of the split {test}", f"eval_strategy={self.value('eval_strategy')}"
            )

    def _rewards(self) -> None:
        names = self.given.get("reward_funcs") or []
        names = list(names) if isinstance(names, list | tuple) else [names]
        model = self.given.get("reward_model_name_or_path") or self.given.get("reward_model_path")
        marker = "reward_model_name_or_path"
        names = [marker, *names] if model and names and marker not in names else names
        functions: list[Any] = []
        for name in names:
            if name == marker:
                functions.append("reward_model")
            elif name in REWARDS:
                functions.append(f"trl.rewards:{name}")
            elif "." in str(name):
                module, _, function = str(name).rpartition(".")
                functions.append(f"{module}:{function}")
            else:
                self.result.leave_open("reward.functions", f"reward_funcs={name}: is defined in the script")
        if model:
            self.set("reward.model_path", model, "reward_model_name_or_path", "reward_model_path")
        if functions:
            self.set("reward.functions", functions, "reward_funcs")
        elif not model and not names and not self._is_unknown("reward_funcs"):
            self.result.leave_open("reward.functions", "the command names no reward, the script may define one")

    def _objective(self) -> None:
        """Set advantage estimator, loss and KL."""
        low, high, n = self.value("epsilon"), self.value("epsilon_high"), self.value("num_generations")
        beta = self.value("beta")
        if self.given.get("mask_truncated_completions") and self.value("loss_type") not in TOKEN_MEAN:
            why = "mask_truncated_completions=true: TRL divides the loss by the number of all completions"
            self.result.leave_open("actor.mask_truncated_completions", why)
        if self.given.get("top_k"):
            self.set("rollout.top_k", self.given["top_k"], "top_k")
        if self.command.program == "rloo":
            self.set("algorithm.adv_estimator", "rloo")
            self.set("actor.loss_agg_mode", "seq-mean-token-sum")
            self.set("algorithm.use_kl_in_reward", beta > 0, "beta")
            self.set("algorithm.kl_ctrl.kl_coef", beta, "beta")
            self.set("actor.clip_ratio_low", low, "epsilon")
            self.set("actor.clip_ratio_high", low if high is None else high, "epsilon_high", "epsilon")
            self.set("actor.clip_ratio_c", None)
            if self.value("num_iterations") > 1 or self._has_several_updates():
                why = (
                    "with several updates per batch, TRL clips the ratio of the whole sequence, a product of its tokens"
                )
                self.result.leave_open("actor.loss_mode", why)
            return
        if self.command.program != "grpo":
            return
        several = self.value("multi_objective_aggregation") == "normalize_then_sum"
        self.set("algorithm.adv_estimator", "gdpo" if several else "grpo", "multi_objective_aggregation")
        scale = self.value("scale_rewards")
        scaled = {"group": True, True: True, "none": False, None: False, False: False}
        by_std = scaled.get(
            scale, Open("advantages are divided by the standard deviation of their group, or not at all")
        )
        self.set("algorithm.norm_adv_by_std_in_grpo", by_std, "scale_rewards")
        self._loss(low, low if high is None else high)
        self.set("actor.use_kl_loss", beta > 0, "beta")
        if beta > 0:
            self.set("actor.kl_loss_coef", beta, "beta")
            if self.value("use_bias_correction_kl"):
                why = "use_bias_correction_kl=true, TRL's default: the KL is not weighted by the importance ratio"
                self.result.leave_open("actor.use_kl_loss", why)
        if self.given.get("use_vllm") and self.value("vllm_importance_sampling_correction"):
            self._correction()
        if n == 1:
            self.result.leave_open("rollout.n", "num_generations=1: a group needs two responses")

    def _correction(self) -> None:
        """Set the correction of the mismatch between vLLM and trainer."""
        names = ("use_vllm", "vllm_importance_sampling_mode")
        level, _, kind = str(self.value("vllm_importance_sampling_mode")).partition("_")
        lower = self.given.get("vllm_importance_sampling_clip_min")
        cap = self.given.get("vllm_importance_sampling_cap") or self.value("vllm_importance_sampling_clip_max")
        self.set("algorithm.rollout_correction.rollout_is", level, *names)
        self.set("algorithm.rollout_correction.rollout_is_threshold", cap, "vllm_importance_sampling_cap",
                 "vllm_importance_sampling_clip_max")  # fmt: skip
        if kind == "mask":  # with a lower bound, weights out of bounds become 0
            self.set("algorithm.rollout_correction.rollout_is_threshold_lower", lower or 1e-30, *names)
        elif lower is not None:
            why = f"vllm_importance_sampling_clip_min={lower}: weights below the lower bound become 0, not the bound"
            self.result.leave_open("algorithm.rollout_correction.rollout_is", why)

    def _has_several_updates(self) -> bool:
        job = self.result.settings
        return job.get("data.train_batch_size") != job.get("actor.ppo_mini_batch_size")

    def _loss(self, low: float, high: float) -> None:
        name, level = self.value("loss_type"), self.value("importance_sampling_level")
        mode, aggregation = LOSSES.get(name, (name, "token-mean"))
        if level == "sequence" and name == "grpo":
            mode = "gspo"
        elif level == "sequence":
            why = f"importance_sampling_level=sequence: {name} sums the ratio of the sequence once per token or once"
            self.result.leave_open("actor.loss_agg_mode", why)
        self.set("actor.loss_mode", mode, "loss_type", "importance_sampling_level")
        self.set("actor.loss_agg_mode", aggregation, "loss_type")
        if self.given.get("entropy_coef") and aggregation != "token-mean":
            why = f"entropy_coef={self.given['entropy_coef']}: TRL averages it over tokens, rlfuse as the loss"
            self.result.leave_open("actor.entropy_coeff", why)
        if mode == "cispo":  # TRL's bound is that of the ratio itself, and there is no lower one
            self.set("actor.clip_ratio_low", 1.0)
            self.set("actor.clip_ratio_high", high - 1 if high > 1 else Open("the ratio would be cut below 1"),
                     "epsilon_high", "epsilon")  # fmt: skip
            return
        self.set("actor.clip_ratio_low", low, "epsilon")
        self.set("actor.clip_ratio_high", high, "epsilon_high", "epsilon")
        self.set("actor.clip_ratio_c", self.value("delta"), "delta")
        for side in ("pos", "neg") if mode == "sapo" else ():
            self.set(f"actor.tau_{side}", self.value(f"sapo_temperature_{side}"), f"sapo_temperature_{side}")

    def _logging(self) -> None:
        names = self.given.get("report_to", "none")
        names = list(names) if isinstance(names, list | tuple | set) else [str(names)]
        names = ["wandb"] if names == ["all"] else names
        known = [name for name in names if name in by_name()["trainer.logger"].names]
        self.set("trainer.logger", ["console", *known], "report_to")
        if "wandb" in known:
            self.result.set_wandb_mode(self.command.environment)
        if project := self.command.environment.get("WANDB_PROJECT") or self.given.get("project"):
            self.result.set("trainer.project_name", project, f"WANDB_PROJECT={project}", "WANDB_PROJECT")

    def _others(self) -> None:
        """Report all settings that are not translated."""
        direct = DIRECT | (DIRECT_ONLINE if self.is_online else {})
        keys = {name: (key,) for name, key in direct.items()} | UNKNOWN
        self.result.report_rest(self.command, READ | direct.keys(), keys, WITHOUT_EFFECT)
        if "model.path" not in self.result.settings and "model.path" not in self.result.undecided:
            raise ConfigError([f"{self.command.origin}: sets no --model_name_or_path; add it to the command"])
