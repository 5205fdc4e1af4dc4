"""`rlfuse translate`: verl commands become equivalent job files, and no setting is lost."""

import io
import json
import sys
from pathlib import Path

import pytest
import yaml

from rlfuse import cli
from rlfuse.config.compose import compose_job, to_config
from rlfuse.config.documentation import by_name
from rlfuse.config.facts import Facts
from rlfuse.config.other_frameworks import counterpart
from rlfuse.errors import ConfigError
from rlfuse.tools.translate.command import as_text, main, read, translate
from rlfuse.tools.translate.conversions import CONVERSIONS, DEFAULTS
from rlfuse.tools.translate.shell import Script

VERLS = json.loads((Path(__file__).parent / "verl_keys.json").read_text())
KNOWN = frozenset(by_name())

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


def of(text, folder, name="run.sh"):
    """Return the job file and its checked job."""
    (folder / name).write_text(text)
    printed = as_text(translate(read([str(folder / name)])), name)
    (folder / "job.yaml").write_text(printed)
    return printed, to_config(compose_job([str(folder / "job.yaml")]), lambda _: Facts())


@pytest.mark.slow
def test_verls_grpo_example_becomes_a_valid_job(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", "/home/me")
    printed, job = of(GRPO, tmp_path)
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
    printed, job = of(PPO, tmp_path)
    assert job.data.train_files == ["/home/me/data/gsm8k/train.parquet", "/home/me/data/math/train.parquet"]
    assert (job.data.max_prompt_length, job.trainer.nnodes, job.trainer.val_before_train) == (1024, 2, False)
    assert job.uses_critic and job.critic.path == job.model.path == "/home/me/models/Qwen2.5-3B-Instruct"
    assert job.rollout.engine_kwargs == {"enforce_eager": False} and job.trainer.logger == ["console", "wandb"]
    assert (job.trainer.default_local_dir, job.run_folder.name) == ("checkpoints", "b")
    assert job.training.ulysses_sequence_parallel_size == 2
    assert (job.actor.optim.lr_warmup_steps_ratio, job.critic.optim.lr_warmup_steps_ratio) == (0.1, 0.05)
    assert (job.algorithm.kl_ctrl.type, job.algorithm.kl_ctrl.target_kl) == ("adaptive", 0.1)
    decide = " ".join(printed.partition("# To decide manually:")[2].replace("#", "").split())
    for part in (
        "reward_model.model.path=$REWARD_MODEL: $REWARD_MODEL is not set in the script; write the value",
        "trainer.total_training_steps=$steps: $steps is not set in the script",
        "rollout.name=sglang: rollout.name must be one of vllm",
        "critic.ppo_micro_batch_size_per_gpu=32: actor.ppo_micro_batch_size_per_gpu in rlfuse: one setting for",
        "--config-name=ppo_trainer.yaml: is not a setting",
    ):
        assert part in decide


def test_words_stdin_and_yaml_give_the_same(tmp_path, monkeypatch, capsys):
    words = [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=3",
        "data.train_files=a",
        "data.shuffle=False",
    ]
    main(["--", "python3", "-m", "verl.trainer.main_ppo", *words])
    typed = capsys.readouterr().out.partition("\n")[2]
    script = "python3 -m verl.trainer.main_ppo " + " ".join(words) + " 2>&1 | tee log"
    tree = "algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {rollout: {n: 3}}\n"
    tree += "data: {train_files: a, shuffle: false, again: '${actor_rollout_ref.rollout.n}'}\n"
    for text in (script, tree.replace(", again: '${actor_rollout_ref.rollout.n}'", "")):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        main(["-"])
        assert capsys.readouterr().out.partition("\n")[2] == typed
    (tmp_path / "a.yaml").write_text("defaults: [ppo_trainer]\n" + tree + "trainer: {project_name: '${absent}'}\n")
    main([str(tmp_path / "a.yaml")])
    printed = capsys.readouterr().out
    assert "defaults: the listed files are not read" in printed and "again=3: no equivalent in rlfuse" in printed
    assert "trainer.project_name=${absent}: the value of ${...} is not in the file" in printed


@pytest.mark.slow
def test_every_verl_key_is_translated_or_listed(tmp_path):
    given = {name: value for name, value in VERLS.items() if value is not None} | {"trainer.save_freq": 5}
    printed, job = of(yaml.safe_dump(given), tmp_path, "all.yaml")
    settled = {name for name, value in given.items() if value in (False, {}, [])} | set(CONVERSIONS) | KNOWN
    for name in given:
        found = counterpart(name, KNOWN)
        assert name in printed or name in settled or (found and found.keys), name
    assert (job.trainer.save_freq, job.trainer.total_epochs, job.rollout.tensor_model_parallel_size) == (5, 30, 2)
    assert set(CONVERSIONS) & set(VERLS), "conversions are of verl's names"


AS_HERE = {
    "data.train_files": "required",
    "data.val_files": "none here, a file of verl's examples there",
    "model.path": "required",
    "critic.path": "the actor's model",
    "trainer.project_name": "a name",
    "trainer.experiment_name": "a name",
    "trainer.default_local_dir": "where runs are kept",
    "trainer.logger": "what is shown",
    "trainer.log_val_generations": "what is shown",
    "rollout.name": "the engine; hf is called transformers here",
    "rollout.update_weights_bucket_mb": "memory",
    "rollout.free_cache_engine": "null lets the memory plan decide",
    "reward.num_workers": "processes",
    "data.seed": "null is no number of anyone",
    "cluster.device": "auto finds GPUs",
    "actor.kl_loss_type": "k3 is low_var_kl",
    "algorithm.kl_penalty": "k1 is kl",
    "actor.clip_ratio_low": "null is clip_ratio",
    "actor.clip_ratio_high": "null is clip_ratio",
    "algorithm.rollout_is_threshold": "without effect under rollout_is=null, verl's default",
    "video.freeze_vision_tower": "towers of clips are trained when asked for",
    "data.max_prompt_length": "the same number under another name",
    "data.max_response_length": "the same number under another name",
}
"""Keys whose default differs from verl's and is not written -> why it stays ours."""


def test_different_defaults_are_written_or_explained():
    differ = {}
    for name, value in VERLS.items():
        found = None if name in KNOWN else counterpart(name, KNOWN)
        key = name if name in KNOWN else found.keys[0] if found and found.is_same else None
        settled = name in CONVERSIONS or (found and found.values)
        if key in KNOWN and value != by_name()[key].default and not settled:
            differ[key] = value
    assert set(differ) <= set(DEFAULTS) | set(AS_HERE), differ
    assert {key: value for key, value in DEFAULTS.items() if key in differ}.items() <= differ.items()


@pytest.mark.parametrize(
    ("given", "set_to"),
    [
        ({"actor_rollout_ref.rollout.do_sample": False}, {}),
        ({"algorithm.rollout_correction.rollout_is": "token"}, {"algorithm.rollout_is_threshold": 2.0}),
        ({"algorithm.rollout_correction.bypass_mode": True}, {"algorithm.old_log_probs": "engine"}),
        ({"algorithm.kl_penalty": "mse"}, {"algorithm.kl_penalty": "mse"}),
        (
            {"algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_ctrl.target_kl": 0.2},
            {"algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_ctrl.target_kl": 0.2},
        ),
        ({"algorithm.adv_estimator": "remax"}, {}),
        ({"actor_rollout_ref.actor.optim.lr_warmup_steps": -1}, {"actor.optim.lr_warmup_steps": -1}),
        (
            {"trainer.total_training_steps": 50, "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": 0.1},
            {"actor.optim.lr_warmup_steps_ratio": 0.1, "trainer.total_training_steps": 50},
        ),
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
        (
            {"custom_reward_function.path": "a.py", "custom_reward_function.reward_kwargs.weight": 2},
            {"reward.functions": [{"path": "a.py:compute_score", "kwargs": {"weight": 2}}]},
        ),
        ({"reward_model.enable": True, "reward_model.model.path": "m"}, {"reward.model_path": "m"}),
        ({"reward_model.enable": False, "reward_model.model.path": "m"}, {}),
        (
            {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.max_num_gen_batches": 0},
            {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.max_num_gen_batches": 0},
        ),
        ({"reward_model.overlong_buffer.enable": False, "reward_model.overlong_buffer.len": 9},
         {"reward.overlong_buffer.len": 0}),
        (
            {
                "critic.optim.weight_decay": 0.01,
                "critic.optim.betas": [0.9, 0.95],
                "critic.optim.min_lr_ratio": None,
                "critic.optim.warmup_style": "cosine",
                "actor_rollout_ref.actor.optim.min_lr_ratio": 0.1,
                "actor_rollout_ref.actor.optim.override_optimizer_config.eps": 1e-6,
            },
            {
                "critic.optim.weight_decay": 0.01,
                "critic.optim.betas": [0.9, 0.95],
                "critic.optim.lr_scheduler_type": "cosine",
                "actor.optim.min_lr_ratio": 0.1,
                "actor.optim.eps": 1e-6,
            },
        ),
        ({"actor_rollout_ref.rollout.val_kwargs.temperature": 0.6}, {"rollout.val_kwargs.temperature": 0.6}),
        (
            {
                "actor_rollout_ref.rollout.val_kwargs.temperature": 0.6,
                "actor_rollout_ref.rollout.val_kwargs.do_sample": False,
            },
            {"rollout.val_kwargs.temperature": 0.0},
        ),
    ],
)  # fmt: skip
def test_values_are_converted_where_they_can_be(given, set_to):
    command = read(["--", "data.shuffle=true"])
    command.settings = given
    job = translate(command)
    left_open = {"reward.functions", *DEFAULTS} - set_to.keys()
    assert {key: value for key, value in job.settings.items() if key not in left_open} == set_to


def test_conflicting_values_are_listed_for_manual_decision():
    command = read(["--", "data.max_prompt_length=9", "actor_rollout_ref.rollout.prompt_length=8"])
    assert translate(command).to_decide == [
        (
            "actor_rollout_ref.rollout.prompt_length=8",
            "data.max_prompt_length is already 9, set by data.max_prompt_length",
        )
    ]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["a=1"], "put the words of a command line after --"),
        (["absent.sh"], "the file does not exist"),
        (["--", "nothing"], "no settings found"),
        (["two.sh"], "has 2 commands that start verl"),
        (["none.sh"], "has no command that starts verl"),
        (["bad.yaml"], "is not valid YAML"),
        (["list.yaml"], "it has no keys"),
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


SHELL = r"""
A="x y"; B=${B:-"${C:-$HOME/q}"}   # comment
LIST=(one "two $A")
LIST+=('three#3')
N=$((2 * (3 + 4) - 1))
UNKNOWN=$(date +%s)
for i in 1 2; do INSIDE=$i; done
run $A "$A" '$A' $B ${LIST[@]} "${LIST[@]}" $N "$UNKNOWN" $INSIDE $EMPTY "$@" \
   # in between \
   last=a\ b`pwd`; other
"""


def test_a_script_is_read_as_a_shell_would_and_never_run():
    (words,) = [words for words in Script().commands(SHELL) if words[0].text == "run"]
    assert [word.text for word in words[1:]] == [
        *("x", "y", "x y", "$A", "${oc.env:HOME}/q", "one", "two", "x", "y", "three#3", "one", "two x y", "three#3"),
        *("13", "$(date +%s)", "$INSIDE", "$EMPTY", "last=a b`pwd`"),
    ]
    assert [word.unknown for word in words[-4:]] == [("$(date +%s)",), ("$INSIDE",), ("$EMPTY",), ("`pwd`",)]
    for text in ("$((1/0))", "$((9**9**9))", "${A%b}", "'open", '"open', "${open", "$(open", "a=(1", "`a", "\\", "$"):
        assert next(Script().commands(f"run {text}"))[0].text == "run"


ODD = r"""cat > notes.txt <<'END'
python3 -m verl.trainer.main_ppo data.train_files=never.parquet
it's no command
END
[ -n "$LONG" ] && LENGTH=4096
ARGS=(
    data.train_batch_size=64
    # the reader's own
    actor_rollout_ref.actor.optim.total_training_steps=500
)
python3 -m verl.trainer.main_ppo "${ARGS[@]}" \
    data.max_response_length=$LENGTH data.max_prompt_length=512 trainer.total_epochs=$EPOCHS \
    trainer.experiment_name="one \
two" trainer.project_name=`date +%F` > out.log 2>&1
"""


def test_odd_scripts_are_read_as_a_shell_would(tmp_path):
    (tmp_path / "run.sh").write_text(ODD)
    job = translate(read([str(tmp_path / "run.sh")]))
    assert job.settings["data.train_batch_size"] == 64 and "data.train_files" not in job.settings
    assert job.settings["trainer.experiment_name"] == "one two", "a continued line in quotes is one"
    assert "trainer.total_training_steps" not in job.settings, "verl puts the run's own number there"
    assert [of for of, _ in job.to_decide] == [
        "data.max_response_length=$LENGTH", "trainer.total_epochs=$EPOCHS", "trainer.project_name=`date +%F`"
    ]  # fmt: skip
    assert "trainer.total_epochs" not in job.settings, "an unknown value is not replaced by the default"
