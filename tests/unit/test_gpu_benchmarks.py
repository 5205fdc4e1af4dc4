"""GPU benchmarks: FLOP counts, and the settings passed to TRL."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import compare_trl_gpu
import trainer_only

from rlfuse.config.compose import load


@pytest.mark.parametrize(("row", "published"), trainer_only.PUBLISHED.items())
def test_mfu_matches_the_published_rows(row, published):
    rate, mfu = published
    computed = rate * trainer_only.QWEN3.flops(row[1]) / trainer_only.PEAK_FLOPS
    assert computed == pytest.approx(mfu, abs=0.005)
    assert trainer_only.QWEN3.parameters == pytest.approx(0.596e9, rel=1e-3)


@pytest.mark.parametrize("arguments", [["--tiny", "--device", "cpu"], []])
def test_both_sides_train_on_the_same_batch(arguments, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}')
    for name in ("prompts.parquet", "tokenizer.json"):
        (tmp_path / name).touch()
    options = compare_trl_gpu.options_of([str(tmp_path), *arguments])
    (_, _, _, _, *words), setting = compare_trl_gpu.ours(tmp_path, tmp_path, options), options.setting
    ours = load([word for word in words if word != "cluster.device=cuda"])
    theirs = compare_trl_gpu.trl_settings(tmp_path, options)
    samples = theirs["per_device_train_batch_size"] * theirs["gradient_accumulation_steps"]
    assert samples == setting.samples == ours.data.train_batch_size * ours.rollout.n
    assert ours.actor.ppo_mini_batch_size == ours.data.train_batch_size, "one update"
    assert (theirs["num_generations"], theirs["max_completion_length"]) == (ours.rollout.n, setting.response)
    assert (theirs["temperature"], theirs["beta"]) == (ours.rollout.temperature, 0.0) and not ours.actor.use_kl_loss
    assert theirs["learning_rate"] == ours.actor.optim.lr and theirs["weight_decay"] == ours.actor.optim.weight_decay


def test_every_setting_exists_in_trl(tmp_path):
    folder = Path(importlib.util.find_spec("trl").origin).parent / "trainer"
    known = set(fields_of(folder / "grpo_config.py", "GRPOConfig"))
    known |= set(fields_of(folder / "base_config.py", "_BaseConfig"))
    transformers = Path(importlib.util.find_spec("transformers").origin).parent
    known |= set(fields_of(transformers / "training_args.py", "TrainingArguments"))
    assert set(compare_trl_gpu.trl_settings(tmp_path, compare_trl_gpu.options_of([str(tmp_path)]))) <= known


def fields_of(file, name):
    (found,) = [node for node in ast.parse(file.read_text()).body if getattr(node, "name", "") == name]
    return [node.target.id for node in found.body if isinstance(node, ast.AnnAssign)]
