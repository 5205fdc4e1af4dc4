"""`rlfuse translate script.py`: the arguments of TRL's trainers and configs in Python scripts become settings."""

import pytest

from rlfuse.errors import ConfigError
from rlfuse.tools.translate.command import read, translate

GRPO = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward
from my_rewards import exact

MODEL = "Qwen/Qwen2-0.5B-Instruct"
dataset = load_dataset("trl-lib/tldr", split="validation")
config = GRPOConfig(output_dir="out", learning_rate=2e-6, num_generations=4, max_steps=200)
GRPOTrainer(model=MODEL, reward_funcs=[exact, think_format_reward], args=config, train_dataset=dataset).train()
raise SystemExit("a script is not executed")
"""
DPO = """
import trl
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2-0.5B-Instruct")
trl.DPOTrainer(model, args=trl.DPOConfig(beta=0.2, per_device_train_batch_size=4), train_dataset=rows).train()
"""


def job_of(text, folder):
    (folder / "train.py").write_text(text)
    return translate(read([str(folder / "train.py")]))


def test_literal_arguments_become_settings(tmp_path):
    job = job_of(GRPO, tmp_path)
    expected = {
        "model.path": "Qwen/Qwen2-0.5B-Instruct",
        "rollout.n": 4,
        "actor.optim.lr": 2e-6,
        "trainer.total_training_steps": 200,
        "reward.functions": ["my_rewards:exact", "trl.rewards:think_format_reward"],
    }
    assert {key: job.settings[key] for key in expected} == expected
    assert (
        "trl-lib/tldr" in job.undecided["data.train_files"][0] and "validation" in job.undecided["data.train_files"][0]
    )
    assert {*job.undecided} == {"data.train_files", "trainer.n_gpus_per_node"}


@pytest.mark.parametrize(
    ("old", "new", "key", "why"),
    [
        ("model=MODEL", "model=load(MODEL)", "model.path", "load(MODEL): the script computes the value"),
        ("num_generations=4", "num_generations=n", "rollout.n", "num_generations=n: the script computes"),
        ("max_steps=200", "**options", "trainer.task", "**=options: the script computes"),
        ("dataset = load_dataset", "dataset = dataset.map(f) or load_dataset", "data.train_files", "dataset"),
        ("[exact, ", "[local, ", "reward.functions", "reward_funcs=local: is defined in the script"),
        ("args=config", "args=config, peft_config=lora", "model.path", "LoRA"),
        ("config = ", "config = None\nconfig = ", "trainer.n_gpus_per_node", "a process per GPU"),
        ("model=MODEL,", "model=MODEL, rollout_func=f,", "trainer.task", "rollout_func=f: the script computes"),
    ],
)
def test_what_a_script_computes_is_left_open(old, new, key, why, tmp_path):
    assert why in "; ".join(job_of(GRPO.replace(old, new), tmp_path).undecided[key])


def test_preference_scripts_become_their_task(tmp_path):
    job = job_of(DPO, tmp_path)
    assert (job.settings["trainer.task"], job.settings["dpo.beta"], job.settings["data.train_batch_size"]) == (
        "dpo",
        0.2,
        4,
    )
    assert "model: the script computes the value" in job.undecided["model.path"][0]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("from trl import (", "not valid Python"),
        ("print('hello')", "0 calls of a trainer of TRL"),
        (GRPO + "GRPOTrainer(model=MODEL)", "2 calls of a trainer of TRL"),
    ],
)
def test_other_scripts_are_refused(text, part, tmp_path):
    with pytest.raises(ConfigError, match=part):
        job_of(text, tmp_path)
