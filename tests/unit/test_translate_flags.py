"""`rlfuse translate`: flags of TRL and OpenRLHF commands, and keys left open for unknown values."""

import dataclasses
from pathlib import Path

import pytest

from rlfuse.tools.translate import trl
from rlfuse.tools.translate.command import read, translate

CORRECTION = "algorithm.rollout_correction"
FILES = "data.train_files=a/gsm8k.parquet actor_rollout_ref.model.path=m algorithm.adv_estimator=grpo"
TRL = "trl grpo --model_name_or_path m --dataset_name ./d --reward_funcs a.b.c --num_processes 2"


def test_defaults_of_trl_equal_those_of_the_installed_version():
    configs = pytest.importorskip("trl")
    for program, name in (("grpo", "GRPO"), ("rloo", "RLOO"), ("sft", "SFT"), ("dpo", "DPO"), ("reward", "Reward")):
        fields = {each.name: each for each in dataclasses.fields(getattr(configs, f"{name}Config"))}
        for setting, value in trl.DEFAULTS[program].items():
            default = fields[setting].default
            default = fields[setting].default_factory() if default is dataclasses.MISSING else default
            assert default == value, (program, setting)


@pytest.mark.parametrize(
    ("flags", "set_to", "undecided"),
    [
        ("", {"reward.functions": ["a.b:c"], "data.train_batch_size": 2, "data.prompt_is_chat": False}, {}),
        ("--beta 0.1 --no_use_bias_correction_kl", {"actor.use_kl_loss": True, "actor.kl_loss_coef": 0.1}, {}),
        ("--beta 0.1", {"actor.kl_loss_coef": 0.1}, {"actor.use_kl_loss": "weighted by the importance ratio"}),
        ("--beta 0.1 --no_use_bias_correction_kl --sync_ref_model --ref_model_sync_steps 64 --num_iterations 2",
         {"ref.sync_ref_model": True, "ref.ref_model_sync_steps": 32, "ref.ref_model_mixup_alpha": 0.6}, {}),
        ("--scale_rewards none", {"algorithm.norm_adv_by_std_in_grpo": False}, {}),
        ("--scale_rewards batch", {}, {"algorithm.norm_adv_by_std_in_grpo": "standard deviation of their group"}),
        ("--loss_type dr_grpo", {"actor.loss_agg_mode": "seq-mean-token-sum-norm"}, {}),
        ("--loss_type sapo --sapo_temperature_neg 2", {"actor.loss_mode": "sapo", "actor.tau_neg": 2.0}, {}),
        ("--loss_type cispo --epsilon_high 5",
         {"actor.loss_mode": "cispo", "actor.clip_ratio_low": 1.0, "actor.clip_ratio_high": 4.0}, {}),
        ("--mask_truncated_completions", {"actor.mask_truncated_completions": True}, {}),
        ("--mask_truncated_completions --loss_type sapo", {},
         {"actor.mask_truncated_completions": "divides the loss by the number of all completions"}),
        ("--loss_type bnpo", {}, {"actor.loss_agg_mode": "over the tokens of one micro-batch"}),
        ("--loss_type vespo", {}, {"actor.loss_mode": "vespo is not in rlfuse"}),
        ("--num_iterations 3 --delta 4", {"actor.ppo_epochs": 3, "actor.clip_ratio_c": 4.0}, {}),
        ("--steps_per_generation 8 --gradient_accumulation_steps 4 --max_steps 100",
         {"data.train_batch_size": 16, "actor.ppo_mini_batch_size": 8, "trainer.total_training_steps": 50}, {}),
        ("--num_generations 3", {}, dict.fromkeys(
            ("data.train_batch_size", "actor.ppo_mini_batch_size"), "16 samples are not whole groups of")),
        ("--use_peft", {}, {"model.path": "LoRA is not supported"}),
        ("--use_vllm --vllm_importance_sampling_mode token_truncate --vllm_importance_sampling_cap 2",
         {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": 2.0}, {}),
        ("--use_vllm --vllm_importance_sampling_clip_min 0.5",
         {f"{CORRECTION}.rollout_is_threshold_lower": 0.5, "trainer.total_epochs": 3}, {}),
        ("--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{\"min_lr_rate\": 0.1}'",
         {"actor.optim.lr_scheduler_type": "cosine", "actor.optim.min_lr_ratio": 0.1}, {}),
        ("--adam_beta2 0.95", {"actor.optim.betas": [0.9, 0.95]}, {}),
        ("--lr_scheduler_type polynomial", {}, {"actor.optim.lr_scheduler_type": "polynomial is not in rlfuse"}),
        ("--repetition_penalty 1.1", {}, {"rollout.temperature": "no such sampling parameter"}),
        ("--some_new_flag 3", {}, {"trainer.task": "rlfuse has no such setting"}),
        ("--loss_type grpo --use_adaptive_entropy --entropy_coef 0.1 --disable_dropout", {},
         {"actor.loss_mode": "no such loss setting", "actor.entropy_coeff": "TRL averages it over tokens"}),
        ("--deepspeed zero3.json", {"actor.zero_stage": 3},
         {"actor.optim.lr_scheduler_type": "may set another optimizer and schedule"}),
        ("--dataset_train_split train[:9]", {}, {"data.train_files": "split train[:9]: rlfuse reads whole files"}),
        ("--lr_scheduler_type constant --warmup_steps 10", {"actor.optim.lr_warmup_steps": None}, {}),
        ("--report_to wandb", {"trainer.logger": ["console", "wandb"], "trainer.wandb_mode": "online"}, {}),
        ("--run_name 007 --output_dir 7", {"trainer.experiment_name": "007", "trainer.default_local_dir": "7"}, {}),
        ("--chat_template_kwargs '{\"enable_thinking\": false}'",
         {"data.apply_chat_template_kwargs": {"enable_thinking": False}}, {}),
        ("--lr_scheduler_type warmup_stable_decay --lr_scheduler_kwargs '{\"num_decay_steps\": 50}' --num_iterations 2",
         {"actor.optim.lr_scheduler_type": "wsd", "actor.optim.lr_wsd_decay_steps": 25}, {}),
        ("--lr_scheduler_kwargs '{open'", {}, {"actor.optim.lr_scheduler_type": "has no equal"}),
        ("--warmup_ratio 0.1 --warmup_steps 10",
         {"actor.optim.lr_warmup_steps": 10, "actor.optim.lr_warmup_steps_ratio": None}, {}),
        ("--eval_strategy steps", {"trainer.test_freq": 10}, {}),
        ("--eval_strategy steps --eval_steps 0.2 --save_steps 0.5 --max_steps 100",
         {"trainer.test_freq": 20, "trainer.save_freq": 50}, {}),
        ("--per_device_train_batch_size 0", {},
         dict.fromkeys(("data.train_batch_size", "actor.ppo_mini_batch_size"), "must be 1 or more")),
    ],
)  # fmt: skip
def test_flags_of_trl_become_keys(flags, set_to, undecided, tmp_path):
    (tmp_path / "run.sh").write_text(f"{TRL} {flags}")
    job = translate(read([str(tmp_path / "run.sh")]))
    assert {key: job.settings.get(key) for key in set_to} == set_to
    assert job.undecided.keys() == undecided.keys()
    for key, why in undecided.items():
        assert why in str(job.undecided[key])


@pytest.mark.parametrize(
    ("command", "keys"),
    [
        (f"{TRL} --per_device_train_batch_size $B", {"data.train_batch_size", "actor.ppo_mini_batch_size"}),
        (f"{TRL} --learning_rate $LR --output_dir $OUT", {"actor.optim.lr"}),
        (TRL.replace("2", "$N"), {"trainer.n_gpus_per_node"}),
        (TRL.replace("./d", "$D"), {"data.train_files"}),
        ("openrlhf.cli.train_ppo_ray --pretrain m --prompt_data ./d --remote_rm_url $URL --n_samples_per_prompt $N",
         {"reward.functions", "rollout.n", "actor.ppo_mini_batch_size"}),
        ("trl sft --model_name_or_path $M --num_processes 1",
         {"model.path", "data.train_files", "trainer.task"}),
        ("trl sft --model_name_or_path m --dataset_name ./d --completion_only_loss --num_processes 1", set()),
        ("trl sft --model_name_or_path m --dataset_name ./d --completion_only_loss --num_processes 1 --loss_type dft "
         "--packing --no_average_tokens_across_devices --train_sampling_strategy sequential",
         {"trainer.task", "data.train_batch_size", "actor.loss_agg_mode", "data.shuffle"}),
        ("trl dpo --model_name_or_path m --dataset_name ./d --sync_ref_model --num_processes 1", set()),
        *((f"{launch} trl/scripts/dpo.py --model_name_or_path m --dataset_name ./d",
           set() if is_known else {"trainer.n_gpus_per_node"}) for launch, is_known in (
            ("python -u", True), ("/bin/python3.12", True), ("torchrun --nproc_per_node 2 --nnodes 2", True),
            ("accelerate launch --config_file examples/accelerate_configs/multi_gpu.yaml", True),
            ("accelerate launch --config_file my/zero3.yaml", False), ("/bin/accelerate launch", False),
            ("torchrun --nproc_per_node 2 --nnodes $N", False), ("torchrun --nproc_per_node 2 --nnodes 1:4", False),
            ("srun", False), ("python -m accelerate.commands.launch", False))),
        ("trl reward --model_name_or_path m --dataset_name ./d --max_length none --num_processes 1",
         {"data.max_prompt_length", "data.max_response_length"}),
        ("openrlhf.cli.train_ppo_ray --pretrain m --prompt_data ./d --remote_rm_url a.py --n_samples_per_prompt 0",
         {"rollout.n"}),
        ("f() {\n openrlhf.cli.train_ppo_ray --pretrain m --prompt_data ./d --remote_rm_url a.py \"$@\"\n}\nf --l2 1",
         {"reward.functions"}),
        (f"python3 -m verl.trainer.main_ppo {FILES} trainer.nnodes=0 actor_rollout_ref.actor.ppo_micro_batch_size=8",
         {"actor.ppo_micro_batch_size_per_gpu"}),
        ("openrlhf.cli.train_ppo_ray --pretrain m --prompt_data ./d --max_samples 9 --remote_rm_url a.py",
         {"data.train_files"}),
        *((f"python3 -m {program} {FILES}", keys) for program, keys in (
            ("verl.trainer.main_ppo", set()), ("recipe.dapo.main_dapo", set()),
            ("recipe.one_step_off_policy.main_ppo", {"trainer.task"}), ("recipe.sppo.main_sppo", {"trainer.task"}))),
        (f"python3 /mine/verl/trainer/main_ppo.py {FILES}", set()),
        ("python mine/scripts/dpo.py --model_name_or_path m --dataset_name ./d", {"trainer.task"}),
        *((f"openrlhf.cli.train_ppo_ray --pretrain m --prompt_data ./d --remote_rm_url a.py {flag}", keys)
          for flag, keys in (("--label_key answer", set()), ("--label_key label", {"data.train_files"}),
                             ("--prompt_split test", {"data.train_files"}))),
        ("openrlhf.cli.train_sft --pretrain m --prompt_data ./d --remote_rm_url http://a:1/b", {"trainer.task"}),
    ],
)  # fmt: skip
def test_keys_with_unknown_values_are_left_open(command, keys, tmp_path):
    (tmp_path / "run.sh").write_text(command)
    assert translate(read([str(tmp_path / "run.sh")])).undecided.keys() == keys


@pytest.mark.parametrize(
    ("launch", "stage"),
    [
        ("--config_file examples/accelerate_configs/deepspeed_zero2.yaml", 2),
        ("--config_file trl/accelerate_configs/fsdp2.yaml", 3),
        ("--num_processes 2 --deepspeed_config_file zero3.json", 3),
        ("--config_file trl/accelerate_configs/multi_gpu.yaml", None),
        ("--num_processes 1 --config_file zero3.yaml", None),
    ],
)
def test_zero_stage_follows_the_accelerate_config(launch, stage, tmp_path):
    (tmp_path / "run.sh").write_text(f"accelerate launch {launch} trl/scripts/dpo.py --model_name_or_path m")
    assert translate(read([str(tmp_path / "run.sh")])).settings.get("actor.zero_stage") == stage


def test_settings_without_effect_are_listed(tmp_path):
    (tmp_path / "run.sh").write_text(f"{TRL} --optim adamw_torch --logging_steps 1 --model_revision main")
    listed = {given for settings in translate(read([str(tmp_path / "run.sh")])).notes.values() for given in settings}
    assert {"optim=adamw_torch", "logging_steps=1", "model_revision=main"} <= listed
    words = ["reward_model.reward_manager=dapo", "actor_rollout_ref.actor.optim.optimizer=AdamW"]
    listed = str(translate(read(["--", "verl.trainer.main_ppo", *words])).notes)
    assert all(word in listed for word in words)


def test_a_config_file_of_trl_is_read_with_its_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("model_name_or_path: m\ndataset_name: ./d\nlearning_rate: 1e-4\n")
    job = translate(
        read(["--", *["trl", "reward", "--config", "c.yaml", "--learning_rate", "3e-4", "--num_processes", "1"]])
    )
    assert job.settings["trainer.task"] == "reward_model" and job.settings["actor.optim.lr"] == 3e-4
    assert not job.undecided
    job = translate(read(["--", "trl", "reward", "--config", "absent.yaml", "--model_name_or_path=m"]))
    assert "settings are unknown" in str(job.undecided["trainer.task"])
    assert "does not name the program" in str(translate(read(["c.yaml"])).undecided["trainer.task"])
