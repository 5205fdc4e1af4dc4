"""`rlfuse translate`: commands become equivalent job files, and no setting is lost.

`public_commands.yaml` has public commands with their sources and the expected jobs.
"""

import io
import json
import sys
from pathlib import Path

import pytest
import yaml

from rlfuse import cli
from rlfuse.config.compose import compose_job, read_command, to_config
from rlfuse.config.documentation import by_name
from rlfuse.config.facts import Facts
from rlfuse.config.keys import is_free
from rlfuse.config.other_frameworks import counterpart
from rlfuse.errors import ConfigError
from rlfuse.tools.translate.command import main, read, translate
from rlfuse.tools.translate.job import affects_training
from rlfuse.tools.translate.undecided import UNDECIDED
from rlfuse.tools.translate.verl import CONVERSIONS, DEFAULTS, DIFFERENCES, LOSS_AGG_MODE, LOSS_MODE

VERLS = json.loads((Path(__file__).parent / "verl_keys.json").read_text())
PUBLIC = yaml.load((Path(__file__).parent / "public_commands.yaml").read_text(), yaml.CSafeLoader)
KNOWN = frozenset(by_name())
CORRECTION = "algorithm.rollout_correction"

GRPO = r"""set -x

python3 -m verl.trainer.main_ppo \
    data.train_files=$HOME/data/gsm8k/train.parquet \
    data.val_files=$HOME/data/gsm8k/test.parquet \
    data.train_batch_size=1024 \
    data.val_batch_size=1312 \
    data.max_prompt_length=512 \
    data.max_response_length=512 \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size=128 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.fsdp_config.param_offload=False \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \
    actor_rollout_ref.rollout.log_prob_micro_batch_size=128 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=False \
    algorithm.kl_ctrl.kl_coef=0.001 \
    trainer.critic_warmup=0 \
    trainer.logger=['console','wandb'] \
    trainer.project_name='verl_grpo_example_gsm8k' \
    trainer.experiment_name='qwen2_7b' \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 \
    trainer.save_freq=-1 \
    trainer.total_epochs=15 $@
"""

PPO = r"""# Discliamer: the model used in the script is only for academic example,
gsm8k_train_path=$HOME/data/gsm8k/train.parquet
math_train_path=$HOME/data/math/train.parquet
train_files="['$gsm8k_train_path', '$math_train_path']"
test_files="['$HOME/data/gsm8k/test.parquet']"
NNODES=${NNODES:-2}
COMMON=(
    algorithm.adv_estimator=gae      # PPO
    data.train_files="$train_files"
    data.val_files="$test_files"
    # data.shuffle=False
    trainer.nnodes=${NNODES}
)
if [ "$DEBUG" = 1 ]; then steps=2; else steps=100; fi

python3 -m verl.trainer.main_ppo --config-name='ppo_trainer.yaml' \
    "${COMMON[@]}" \
    data.train_batch_size=1024 \
    data.max_prompt_length=$((512 * 2)) \
    data.max_response_length=512 \
    actor_rollout_ref.model.path="$HOME/models/Qwen2.5-3B-Instruct" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.enforce_eager=False \
    actor_rollout_ref.rollout.name=sglang \
    critic.optim.lr=1e-5 \
    critic.model.use_remove_padding=True \
    critic.optim.lr_warmup_steps_ratio=0.05 \
    critic.model.path="$HOME/models/Qwen2.5-3B-Instruct" \
    critic.model.enable_gradient_checkpointing=False \
    critic.ppo_micro_batch_size_per_gpu=32 \
    reward_model.enable=True \
    reward_model.model.path="$REWARD_MODEL" \
    algorithm.use_kl_in_reward=True \
    algorithm.kl_ctrl.type=adaptive \
    algorithm.kl_ctrl.target_kl=0.1 \
    +trainer.val_before_train=False \
    trainer.logger='["console","swanlab","wandb"]' \
    trainer.default_local_dir=checkpoints/a/b \
    trainer.project_name=a trainer.experiment_name=b \
    trainer.total_training_steps=$steps \
    trainer.test_freq=10 $@
"""


def job_of(text, folder, name="run.sh", decided=()):
    """Return the job file and its checked job. `decided`: settings for the keys that are left open."""
    (folder / name).write_text(text)
    printed = translate(read([str(folder / name)])).as_text(name)
    (folder / "job.yaml").write_text(printed)
    return printed, to_config(compose_job([str(folder / "job.yaml"), *decided]), lambda _: Facts())


def training_settings(job):
    """Return the keys of a translation that change what is trained, with `???` for those left open."""
    settings = job.settings | dict.fromkeys(job.undecided, "???")
    return {key: value for key, value in settings.items() if is_free(key) or value == "???" or affects_training(key)}


@pytest.mark.slow
@pytest.mark.parametrize("given", PUBLIC, ids=[given["name"] for given in PUBLIC])
def test_a_public_command_becomes_the_equivalent_job(given, tmp_path):
    file = tmp_path / ("config.yaml" if given.get("form") == "yaml" else "run.sh")
    file.write_text(given["command"])
    job = translate(read([str(file)]))
    assert training_settings(job) == given["job"]
    printed = tmp_path / "job.yaml"
    printed.write_text(job.as_text(file.name))
    if not job.undecided:
        assert to_config(compose_job([str(printed)]), lambda _: Facts())
        return
    with pytest.raises(ConfigError) as refused:
        read_command([str(printed)])
    for key, reasons in job.undecided.items():
        (line,) = [line for line in refused.value.problems if f": {key}=???: is undecided (" in line]
        assert all(reason in line for reason in reasons) and line.endswith("write a value")


def test_sources_of_public_commands_are_complete():
    for framework in ("verl", "TRL", "OpenRLHF"):
        assert sum(given["name"].startswith(framework) for given in PUBLIC) >= (10 if framework != "OpenRLHF" else 5)
    for source in (given["source"] for given in PUBLIC):
        assert {*source} == {"repo", "path", "commit"} and len(source["commit"]) == 40, source


def test_an_undecided_job_is_rejected_until_it_is_decided(tmp_path, capsys):
    words = ["algorithm.adv_estimator=grpo_passk", "data.train_files=gsm8k.parquet", "actor_rollout_ref.model.path=m"]
    (tmp_path / "job.yaml").write_text(translate(read(["--", "verl.trainer.main_ppo", *words])).as_text("words"))
    assert cli.main(["train", str(tmp_path / "job.yaml")]) == 2
    line = next(line for line in capsys.readouterr().err.splitlines() if "adv_estimator" in line)
    assert "job.yaml:" in line and "grpo_passk is not in rlfuse, which has " in line
    assert "advantage only for the best response of a group" in line and line.endswith("write a value")
    for decision in ("algorithm.adv_estimator=grpo", "algorithm=grpo"):
        assert compose_job([str(tmp_path / "job.yaml"), decision]).algorithm.adv_estimator == "grpo"


@pytest.mark.parametrize(("framework", "row"), [(name, row) for name, rows in UNDECIDED.items() for row in rows])
def test_settings_with_an_equivalent_are_not_listed_as_undecided(framework, row):
    found = counterpart(row.name, KNOWN) if framework == "verl" else None
    assert row.why and (row.key in KNOWN or row.values)
    assert row.key or not {*row.values} & {*by_name()[row.name].names}, "the registry has these values"
    assert row.values or (row.name not in KNOWN and not (found and found.is_same)), "this is a key"


@pytest.mark.parametrize(
    ("words", "stage"),
    [
        ("", 3),
        ("actor_rollout_ref.actor.strategy=fsdp2", 3),
        ("actor_rollout_ref.actor.fsdp_config.reshard_after_forward=False", 2),
        ("actor_rollout_ref.actor.fsdp_config.fsdp_size=4 trainer.nnodes=2", 3),
        ("actor_rollout_ref.actor.fsdp_config.fsdp_size=1", None),
        ("actor_rollout_ref.actor.strategy=megatron", None),
        ("--config-name=ppo_megatron_trainer", None),
        ("trainer.n_gpus_per_node=1", None),
    ],
)
def test_zero_stage_follows_the_fsdp_settings_of_verl(words, stage):
    given = ["python3", "-m", "verl.trainer.main_ppo", "data.train_files=a", *words.split()]
    assert translate(read(["--", *given])).settings.get("actor.zero_stage") == stage


WANDB = "python3 -m verl.trainer.main_ppo data.train_files=gsm8k actor_rollout_ref.model.path=m trainer.nnodes=1"


@pytest.mark.parametrize(
    ("script", "mode"),
    [
        (WANDB, "online"),
        (f"WANDB_MODE=offline {WANDB}", "offline"),
        (f"export WANDB_MODE=disabled\n{WANDB}", "disabled"),
        (f"{WANDB} trainer.logger=[console]", None),
    ],
)
def test_wandb_uploads_if_the_original_does(script, mode, tmp_path):
    (tmp_path / "run.sh").write_text(script)
    assert translate(read([str(tmp_path / "run.sh")])).settings.get("trainer.wandb_mode") == mode


@pytest.mark.slow
def test_verls_grpo_example_becomes_a_valid_job(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", "/home/me")
    printed, job = job_of(GRPO, tmp_path)
    assert job.data.train_files == ["/home/me/data/gsm8k/train.parquet"] and job.data.train_batch_size == 1024
    assert (job.rollout.n, job.rollout.val_kwargs.temperature, job.algorithm.adv_estimator) == (5, 0.0, "grpo")
    assert job.actor.ppo_micro_batch_size_per_gpu == 16, "128 over 8 ranks"
    assert (job.actor.use_kl_loss, job.actor.kl_loss_type, job.actor.optim.lr) == (True, "low_var_kl", 1e-6)
    assert (job.trainer.logger, job.trainer.save_freq, job.trainer.total_epochs) == (["console", "wandb"], -1, 15)
    assert job.reward.functions == ["rlfuse.rewards.verifiers.numeric:score"]
    assert "  n: 5  # actor_rollout_ref.rollout.n\n" in printed and "max_prompt_length: 512\n" in printed
    assert "  save_freq: -1\n" in printed and "test_freq: -1  # verl's default\n" in printed
    assert "data.val_batch_size=1312: all validation rows are generated together" in printed
    assert max(map(len, printed.splitlines())) <= 120
    assert cli.main(["translate", str(tmp_path / "run.sh")]) == 0 and capsys.readouterr().out == printed


def test_verls_ppo_example_lists_manual_decisions(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    decisions = {"trainer.total_training_steps": 5, "reward.model_path": "r", "trainer.task": "rl"}
    printed, job = job_of(PPO, tmp_path, decided=[f"{key}={value}" for key, value in decisions.items()])
    assert job.data.train_files == ["/home/me/data/gsm8k/train.parquet", "/home/me/data/math/train.parquet"]
    assert (job.data.max_prompt_length, job.trainer.nnodes, job.trainer.val_before_train) == (1024, 2, False)
    assert job.uses_critic and job.critic.path == job.model.path == "/home/me/models/Qwen2.5-3B-Instruct"
    assert job.rollout.engine_kwargs == {"enforce_eager": False} and job.trainer.logger == ["console", "wandb"]
    assert (job.trainer.default_local_dir, job.run_folder.name) == ("checkpoints", "b")
    assert job.training.ulysses_sequence_parallel_size == 2 and job.rollout.name == "vllm"
    assert (job.actor.optim.lr_warmup_steps_ratio, job.critic.optim.lr_warmup_steps_ratio) == (0.1, 0.05)
    assert (job.algorithm.kl_ctrl.type, job.algorithm.kl_ctrl.target_kl) == ("adaptive", 0.1)
    text = " ".join(printed.replace("#", "").split())
    for part in (
        "model_path: ??? reward_model.model.path=$REWARD_MODEL: $REWARD_MODEL is not set in the script",
        "total_training_steps: ??? trainer.total_training_steps=$steps: $steps is not set in the script",
        "critic.ppo_micro_batch_size_per_gpu=32: actor.ppo_micro_batch_size_per_gpu in rlfuse: one setting for",
        "--config-name=ppo_trainer.yaml: has verl's defaults",
    ):
        assert part in text, part


def test_arguments_stdin_and_yaml_give_the_same_job(tmp_path, monkeypatch, capsys):
    words = "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=3 data.train_files=a data.shuffle=False"
    main(["--", "python3", "-m", "verl.trainer.main_ppo", *words.split()])
    typed = capsys.readouterr().out.partition("\n")[2]
    script = f"python3 -m verl.trainer.main_ppo {words} 2>&1 | tee log"
    tree = "algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {rollout: {n: 3}}\n"
    tree += "data: {train_files: a, shuffle: false, again: '${actor_rollout_ref.rollout.n}'}\n"
    for text in (script, tree.replace(", again: '${actor_rollout_ref.rollout.n}'", "")):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        main(["-"])
        assert capsys.readouterr().out.partition("\n")[2] == typed
    (tmp_path / "a.yaml").write_text("defaults: [ppo_trainer]\n" + tree + "trainer: {project_name: '${absent}'}\n")
    main([str(tmp_path / "a.yaml")])
    printed = capsys.readouterr().out
    assert "defaults: the listed files are not read" in printed and "again=3: rlfuse has no such setting" in printed
    assert "trainer.project_name=${absent}: the value of ${...} is not in the file" in printed


ROWS = {row.name for row in UNDECIDED["verl"]}


@pytest.mark.slow
def test_every_verl_key_is_translated_or_listed(tmp_path):
    given = {name: value for name, value in VERLS.items() if value is not None} | {"trainer.save_freq": 5}
    printed, job = job_of(yaml.safe_dump(given), tmp_path, "all.yaml")
    settled = {name for name, value in given.items() if value in (False, {}, [])} | set(CONVERSIONS) | KNOWN
    for name in given:
        found = counterpart(name, KNOWN)
        listed = any(name == row or name.startswith(f"{row}.") for row in ROWS)
        assert name in printed or name in settled or listed or (found and found.keys), name
    assert "???" not in printed, "verl's defaults need no decision"
    assert (job.trainer.save_freq, job.trainer.total_epochs, job.rollout.tensor_model_parallel_size) == (5, 30, 2)
    assert set(CONVERSIONS) & set(VERLS), "conversions have verl's names"


KEPT_DEFAULTS = {
    "data.train_files": "required",
    "data.val_files": "rlfuse: none; verl: a file of its examples",
    "model.path": "required",
    "critic.path": "the actor's model",
    "trainer.project_name": "a name",
    "trainer.experiment_name": "a name",
    "trainer.default_local_dir": "folder of runs",
    "trainer.logger": "what is shown",
    "trainer.log_val_generations": "what is shown",
    "rollout.name": "the engine; rlfuse calls hf transformers",
    "rollout.update_weights_bucket_mb": "memory",
    "rollout.free_cache_engine": "null lets the memory plan decide",
    "reward.num_workers": "processes",
    "data.seed": "null is not a seed",
    "cluster.device": "auto finds GPUs",
    "actor.kl_loss_type": "k3 is low_var_kl",
    "algorithm.kl_penalty": "k1 is kl",
    "actor.clip_ratio_low": "null is clip_ratio",
    "actor.clip_ratio_high": "null is clip_ratio",
    "video.freeze_vision_tower": "vision towers are trained on request",
    "data.max_prompt_length": "the same number under another name",
    "data.max_response_length": "the same number under another name",
}
"""Keys whose default differs from verl's and is not written -> reason."""
ADAPTIVE_KL = {"algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_ctrl.target_kl": 0.2}
FILTER_GROUPS = {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.max_num_gen_batches": 0}


def test_different_defaults_are_written_or_explained():
    differ = {}
    for name, value in VERLS.items():
        found = None if name in KNOWN else counterpart(name, KNOWN)
        key = name if name in KNOWN else found.keys[0] if found and found.is_same else None
        settled = name in CONVERSIONS or (found and found.values)
        if key in KNOWN and value != by_name()[key].default and not settled:
            differ[key] = value
    assert set(differ) <= set(DEFAULTS) | set(KEPT_DEFAULTS), differ
    assert {key: value for key, value in DEFAULTS.items() if key in differ}.items() <= differ.items()


@pytest.mark.parametrize(
    ("given", "set_to"),
    [
        ({"actor_rollout_ref.rollout.do_sample": False}, {}),
        ({f"{CORRECTION}.rollout_is": "sequence"}, {f"{CORRECTION}.rollout_is": "sequence"}),
        ({"algorithm.rollout_is": True}, {f"{CORRECTION}.rollout_is": "token"}),
        ({"actor_rollout_ref.actor.tis_imp_ratio_cap": 3},
         {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": 3}),
        ({f"{CORRECTION}.rollout_is_threshold": "0.5_5.0"},
         {f"{CORRECTION}.rollout_is_threshold": 5.0, f"{CORRECTION}.rollout_is_threshold_lower": 0.5}),
        ({f"{CORRECTION}.rollout_rs_threshold": "0.5_2.0,0.1"}, {}),
        ({"actor_rollout_ref.actor.policy_loss.ppo_kl_coef": 1.0}, {"actor.ppo_kl_coef": 1.0}),
        ({LOSS_MODE: "gspo"}, {"actor.loss_mode": "gspo", "actor.loss_agg_mode": "seq-mean-token-mean"}),
        ({LOSS_MODE: "sapo", LOSS_AGG_MODE: "token-mean"},
         {"actor.loss_mode": "sapo", "actor.loss_agg_mode": "seq-mean-token-mean"}),
        ({LOSS_MODE: "gspo", "actor_rollout_ref.actor.use_kl_loss": True},
         {"actor.loss_mode": "gspo", "actor.use_kl_loss": True}),
        ({LOSS_MODE: "cispo", LOSS_AGG_MODE: "seq-mean-token-sum"},
         {"actor.loss_mode": "cispo", "actor.loss_agg_mode": "seq-mean-token-sum"}),
        ({"algorithm.rollout_correction.bypass_mode": True}, {"algorithm.old_log_probs": "engine"}),
        ({"algorithm.kl_penalty": "mse"}, {"algorithm.kl_penalty": "mse"}),
        (ADAPTIVE_KL, ADAPTIVE_KL),
        ({"algorithm.adv_estimator": "remax"}, {"algorithm.adv_estimator": "remax"}),
        ({"algorithm.adv_estimator": "grpo_vectorized"}, {"algorithm.adv_estimator": "grpo"}),
        ({"algorithm.adv_estimator": "grpo_passk"}, {}),
        ({"actor_rollout_ref.rollout.name": "sglang"}, {"rollout.name": "vllm"}),
        ({"actor_rollout_ref.actor.optim.lr_warmup_steps": -1}, {"actor.optim.lr_warmup_steps": -1}),
        ({"trainer.total_training_steps": 50, "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": 0.1},
         {"actor.optim.lr_warmup_steps_ratio": 0.1, "trainer.total_training_steps": 50}),
        ({"trainer.save_freq": -1, "trainer.test_freq": -1}, {"trainer.save_freq": -1, "trainer.test_freq": -1}),
        ({"actor_rollout_ref.actor.clip_ratio": 0.2}, {"actor.clip_ratio": 0.2}),
        ({"actor_rollout_ref.actor.clip_ratio": 0.1}, {}),
        (
            {
                "actor_rollout_ref.actor.clip_ratio": 0.1,
                "actor_rollout_ref.actor.clip_ratio_low": None,
                "actor_rollout_ref.actor.clip_ratio_high": None,
            },
            {"actor.clip_ratio": 0.1, "actor.clip_ratio_low": None, "actor.clip_ratio_high": None},
        ),
        ({"custom_reward_function.path": "a.py", "custom_reward_function.reward_kwargs.weight": 2},
         {"reward.functions": [{"path": "a.py:compute_score", "kwargs": {"weight": 2}}]}),
        ({"reward_model.enable": True, "reward_model.model.path": "m"}, {"reward.model_path": "m"}),
        ({"reward_model.enable": False, "reward_model.model.path": "m"}, {}),
        (FILTER_GROUPS, FILTER_GROUPS),
        ({"reward_model.overlong_buffer.enable": False, "reward_model.overlong_buffer.len": 9},
         {"reward.overlong_buffer.len": 0}),
        ({"custom_reward_function.path": "pkg://a.b", "custom_reward_function.reward_kwargs": {"c": [1]}},
         {"reward.functions": [{"path": "a.b:compute_score", "kwargs": {"c": [1]}}]}),
        (
            {
                "critic.optim.weight_decay": 0.02,
                "critic.optim.betas": [0.9, 0.95],
                "critic.optim.min_lr_ratio": None,
                "critic.optim.warmup_style": "cosine",
                "actor_rollout_ref.actor.optim.min_lr_ratio": 0.1,
                "actor_rollout_ref.actor.optim.override_optimizer_config.eps": 1e-6,
            },
            {
                "critic.optim.weight_decay": 0.02,
                "critic.optim.betas": [0.9, 0.95],
                "critic.optim.lr_scheduler_type": "cosine",
                "actor.optim.min_lr_ratio": 0.1,
                "actor.optim.eps": 1e-6,
            },
        ),
        ({"actor_rollout_ref.rollout.val_kwargs.temperature": 0.6}, {"rollout.val_kwargs.temperature": 0.6}),
        ({"actor_rollout_ref.rollout.val_kwargs.temperature": 0.6,
          "actor_rollout_ref.rollout.val_kwargs.do_sample": False}, {"rollout.val_kwargs.temperature": 0.0}),
    ],
)  # fmt: skip
def test_values_are_converted_if_possible(given, set_to):
    command = read(["--", "data.shuffle=true"])
    command.settings = given
    job = translate(command)
    left_open = {"reward.functions", "trainer.wandb_mode", "actor.zero_stage", *DEFAULTS} - set_to.keys()
    assert {key: value for key, value in job.settings.items() if key not in left_open} == set_to
    assert "trainer.task" not in job.undecided


@pytest.mark.parametrize(
    ("words", "key", "why"),
    [
        (["data.max_prompt_length=9", "actor_rollout_ref.rollout.prompt_length=8"], "data.max_prompt_length",
         "actor_rollout_ref.rollout.prompt_length=8: 9 by data.max_prompt_length; rlfuse has one setting for both"),
        (["actor_rollout_ref.model.lora_rank=32"], "model.path", "lora_rank=32: LoRA is not supported"),
        (["actor_rollout_ref.rollout.multi_turn.enable=True"], "rollout.name", "single-turn, without tools"),
        (["actor_rollout_ref.rollout.thinking_budget=9"], "trainer.task", "rlfuse has no such setting"),
        (["data.custom_cls.path=a.py"], "data.train_files", "rows are read by rlfuse"),
        (["data.train_files=[a/geo3k/train.parquet]"], "reward.functions", "verl scores by data_source"),
        (["reward_model.reward_manager=mine"], "reward.functions", "called for every sample, without a manager"),
        (["trainer.val_only=True"], "trainer.task", "use `rlfuse eval`"),
        (["algorithm.adv_estimator=gae"], "critic.path", "the command does not set it"),
        (["algorithm.adv_estimator=[gae]"], "algorithm.adv_estimator", "needs a string"),
        (["actor_rollout_ref.actor.tis_imp_ratio_cap=a"], f"{CORRECTION}.rollout_is_threshold", "needs a number"),
        (["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc",
          "reward_model.overlong_buffer.enable=True"], "algorithm.filter_groups.enable", "with the overlong penalty"),
        (["actor_rollout_ref.actor.optim.optimizer=Muon"], "actor.optim.lr", "rlfuse trains with AdamW"),
        ([f"{LOSS_MODE}=gspo", "actor_rollout_ref.actor.entropy_coeff=0.1"], "actor.loss_agg_mode",
         "gspo by seq-mean-token-mean, KL loss and entropy bonus by loss_agg_mode"),
        (["data.gen_batch_size=1536", "data.train_batch_size=512"], "data.train_batch_size", "verl trains on these"),
        (["actor_rollout_ref.model.lora.adapter_path=a"], "model.path", "LoRA is not supported"),
        (["custom_reward_function.path=a.py", "reward_model.enable=True", "reward_model.model.path=b"],
         "reward.functions", "the score of the reward model alone"),
        (["data.seed=1", "--config-path=/mine", "--config-name=ppo_trainer"], "trainer.task",
         "--config-path=/mine: is not a setting"),
        (["data.seed=1", "~data.shuffle"], "trainer.task", "~data.shuffle: removes a setting of the framework"),
        (["data.train_batch_size=${a.b}"], "data.train_batch_size", "the value of ${...} is not in the command"),
    ],
)  # fmt: skip
def test_settings_that_rlfuse_would_train_differently_are_left_open(words, key, why):
    assert why in str(translate(read(["--", "verl.trainer.main_ppo", *words])).undecided[key])


@pytest.mark.parametrize(("key", "value"), DIFFERENCES)
def test_methods_that_differ_from_verls_are_marked(key, value):
    name, value = {"actor.loss_mode": LOSS_MODE}.get(key, key), value or "seq_max_k2"
    printed = translate(read(["--", "verl.trainer.main_ppo", f"{name}={value}"])).as_text("words")
    assert DIFFERENCES.get((key, value), DIFFERENCES.get((key, None))) in printed
    other = translate(read(["--", "verl.trainer.main_ppo", "algorithm.adv_estimator=grpo"]))
    assert not {*DIFFERENCES.values()} & {*other.comments.values()}


def test_references_to_other_settings_are_replaced():
    words = ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=${data.train_batch_size}"]
    words += ["trainer.project_name=${oc.env:USER}", "trainer.experiment_name=b${data.train_batch_size}"]
    job = translate(read(["--", "verl.trainer.main_ppo", *words])).settings
    assert (job["actor.ppo_mini_batch_size"], job["trainer.experiment_name"]) == (8, "b8")
    assert job["trainer.project_name"] == "${oc.env:USER}"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["a=1"], "put the words of a command line after --"),
        (["absent.sh"], "the file does not exist"),
        (["--", "nothing"], "no settings found"),
        (["two.sh"], "has 2 commands that start training"),
        (["none.sh"], "has no command that starts training"),
        (["bad.yaml"], "is not valid YAML"),
        (["list.yaml"], "it has no keys"),
        (["--", "trl", "grpo", "--model_name_or_path", "m", "--num_generations", "few"], "=few: must be a number"),
        (["--", "trl", "grpo", "--model_name_or_path", "m", "--max_steps", "inf"], "=inf: must be a number"),
        (["--", "trl", "dpo", "--model_name_or_path", "m", "--adam_beta1", "x"], "adam_beta1=x: must be a number"),
        (["--", "trl", "grpo", "--model_name_or_path", "m", "--loss_type", "a", "b"], "must be text; correct"),
        (["--", "trl", "grpo", "--dataset_name", "d"], "sets no --model_name_or_path"),
        (["--", "trl", "grpo", "--config", "bad.yaml"], "--config bad.yaml: can't be read as YAML"),
        (["--", "openrlhf.cli.train_ppo_ray", "--adam_betas", "0.9"], "adam_betas=0.9: must be 2 numbers"),
        (["--", "openrlhf.cli.train_ppo_ray", "--eps_clip_low_high", "a", "b"], "must be 2 numbers"),
        (["--", "openrlhf.cli.train_ppo_ray", "--overlong_buffer_len", "a"], "overlong_buffer_len=a: must be a number"),
    ],
)
def test_invalid_commands_are_reported(arguments, part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "two.sh": "python -m verl.trainer.main_ppo a=1\npython -m verl.trainer.main_ppo a=2",
        "none.sh": "echo hello",
        "bad.yaml": "a: [1",
        "list.yaml": "- a",
    }.items():
        Path(name).write_text(text)
    with pytest.raises(ConfigError, match=part):
        main(arguments)
