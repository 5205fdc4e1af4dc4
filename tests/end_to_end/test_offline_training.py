"""Supervised fine-tuning and DPO on real ranks: gradients in every layout, evaluation, and resumed jobs."""

import json
import subprocess
import sys
from copy import deepcopy

import numpy as np
import pytest
import torch
from trainer_probe import Probe, distance
from transformers import AutoModelForCausalLM

from rlfuse.config.schema import Config
from rlfuse.data.demonstrations import load_demonstrations
from rlfuse.data.preferences import load_policy_preferences
from rlfuse.data.tokenizers import load_tokenizer
from rlfuse.engines.trainer.offline_trainer import OfflineTrainer
from rlfuse.observe.tracking import read_metrics
from rlfuse.run.offline.demonstrations import SupervisedFineTuning
from rlfuse.run.offline.direct_preferences import DirectPreferenceOptimisation

BETA = 0.2
BOTH = """
import json, sys
from rlfuse.application import main
first, second = json.loads(sys.argv[1])
sys.exit(main(first) or print("FINISHED", flush=True) or main(second))
"""
"""Runs two jobs in one process, as a sweep does, because imports are most of a small job's cost."""
TASKS = {"sft": SupervisedFineTuning, "dpo": DirectPreferenceOptimisation}


class Offline(OfflineTrainer, Probe):
    """Trainer whose gradients can be read."""


@pytest.fixture(scope="module")
def config(tiny_model, tmp_path_factory):
    """Write rows that are both demonstrations and pairs; every third pair shares its prompt with the previous one."""
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("rows") / "rows.jsonl"

    def words(most):
        return "".join(f" w{n}" for n in rng.integers(3, 199, rng.integers(2, most)))

    rows = []
    for i in range(24):
        prompt = rows[-1]["prompt"] if i % 3 == 2 else words(8)
        chosen, rejected = words(20), words(20)
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected, "completion": chosen})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config()
    config.trainer.task, config.model.path, config.model.dtype = "dpo", str(tiny_model), "float32"
    config.data.train_files, config.trainer.n_gpus_per_node, config.cluster.timeout_s = [str(path)], 2, 300
    config.actor.optim.lr, config.actor.optim.weight_decay, config.actor.grad_clip = 1e-3, 0.0, 0.0
    config.actor.ppo_max_token_len_per_gpu, config.dpo.beta = 64, BETA
    config.ref.path = str(shifted(tiny_model, tmp_path_factory.mktemp("reference")))
    return config


def shifted(folder, to):
    """Save a reference that differs from the policy, so that implicit rewards are not 0 in the first step."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(to)
    return to


@pytest.fixture(scope="module")
async def trainer(config, slots):
    return (await Offline.start(config, slots))[0]


async def task_of(trainer, config, name, **changes):
    """Reload the models in the same processes for a task with other settings."""
    config = deepcopy(config)
    config.trainer.task = name
    for key, value in changes.items():
        *groups, leaf = key.split("__")
        target = config
        for group in groups:
            target = getattr(target, group)
        setattr(target, leaf, value)
    await trainer.meet(config)
    await trainer.take(config)
    trainer._buckets.clear()
    task = TASKS[name](config, load_tokenizer(config.model))
    task.trainer = trainer
    return task


def log_probs(model, prompt, completion):
    """Return the log-probs of the completion's tokens, one sequence at a time."""
    ids = torch.tensor(np.concatenate([prompt, completion]).astype(np.int64))
    logits = model(ids[None]).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0]


def by_formula(config, loss_type):
    """Return (loss, metrics, gradients) by the papers' formulas in plain torch; `loss_type`: None for sft."""
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (config.model.path, config.ref.path)
    )
    files, tokenizer = config.data.train_files, load_tokenizer(config.model)
    if loss_type is None:
        rows = [each.row for each in load_demonstrations(files, tokenizer, config.data)[0]]
        loss = -torch.cat([log_probs(policy, row.prompt_ids, row.response_ids) for row in rows]).mean()
        metrics = {}
    else:
        ratios = []
        for pair in load_policy_preferences(files, tokenizer, config.data)[0]:
            for ids in (pair.chosen_ids, pair.rejected_ids):
                with torch.no_grad():
                    of_reference = log_probs(reference, pair.shared_ids, ids)
                each = log_probs(policy, pair.shared_ids, ids) - of_reference
                ratios.append(each.sum() if loss_type == "sigmoid" else each.mean())
        gaps = torch.stack(ratios[::2]) - torch.stack(ratios[1::2])
        losses = torch.log1p(torch.exp(-BETA * gaps)) if loss_type == "sigmoid" else (gaps - 1 / (2 * BETA)) ** 2
        loss, metrics = losses.mean(), {}
        if loss_type == "sigmoid":
            metrics["rewards/margins"] = float(BETA * gaps.mean())
            metrics["rewards/accuracies"] = float((gaps > 0).float().mean())
    loss.backward()
    return float(loss.detach()), metrics, {name: each.grad for name, each in policy.named_parameters()}


LAYOUTS = {
    "packed": {},
    "padded": {"model__use_remove_padding": False},
    "zero 3": {"actor__zero_stage": 3},
    "fsdp2": {"actor__strategy": "fsdp2"},
    "sequence parallel": {"training__ulysses_sequence_parallel_size": 2, "actor__ppo_max_token_len_per_gpu": 24},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "loss_type"), [("sft", None), ("dpo", "sigmoid"), ("dpo", "ipo")])
async def test_two_ranks_compute_the_formula(trainer, config, name, loss_type, layout):
    task = await task_of(trainer, config, name, dpo__loss_type=loss_type or "sigmoid", **LAYOUTS[layout])
    loss, metrics, gradients = by_formula(config, loss_type)
    held_out = await trainer.evaluate(await task.rows(task.examples))
    found = await task.learn(task.examples, 1.0)
    assert {key: found[key] for key in held_out} == pytest.approx(held_out, rel=1e-5, abs=1e-6)
    assert found["actor/loss"] == pytest.approx(loss, rel=1e-5)
    found = {key: found[key] for key in metrics}
    assert found == pytest.approx(metrics, rel=1e-4, abs=1e-5)  # margins are differences of log-probs
    assert distance(await trainer.gradients(), gradients) < 1e-4


@pytest.mark.parametrize("name", TASKS)
def test_a_resumed_job_has_the_metrics_of_the_uninterrupted_one(config, name, tmp_path):
    rows = config.data.train_files[0]
    words = [f"trainer.task={name}", f"model.path={config.model.path}", "model.dtype=float32", "cluster.device=cpu"]
    words += [f"data.train_files={rows}", f"data.val_files={rows}", "data.prompt_is_chat=false", "actor.optim.lr=1e-3"]
    words += ["data.train_batch_size=8", "actor.ppo_max_token_len_per_gpu=64", "trainer.n_gpus_per_node=2"]
    words += [
        "trainer.total_training_steps=4",
        "trainer.save_freq=2",
        "trainer.test_freq=4",
        "trainer.logger=[console]",
    ]
    words += [f"trainer.default_local_dir={tmp_path}", "trainer.logger=[console]"]
    words += ["ref.sync_ref_model=true", "ref.ref_model_sync_steps=2"] * (name == "dpo")

    folder = tmp_path / "rlfuse"
    resume = [f"trainer.resume_mode={folder / 'whole' / 'global_step_2'}"]
    jobs = [[*words, "trainer.experiment_name=whole"], [*words, "trainer.experiment_name=rest", *resume]]
    done = subprocess.run([sys.executable, "-c", BOTH, json.dumps(jobs)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    output, resumed = done.stdout.split("FINISHED")
    whole, rest = (read_metrics(folder / run / "metrics.jsonl") for run in ("whole", "rest"))
    names = [key for key in whole[-1] if key.startswith(("actor/", "rewards/", "val-"))]
    assert [{key: row.get(key) for key in names} for row in rest] == [
        {key: row.get(key) for key in names} for row in whole if row["step"] > 2
    ]
    first, last = (row[f"val-aux/{name}/loss"] for row in (whole[0], whole[-1]))
    assert last < first and "held out  " in output and "resumed from" in resumed
    if name == "dpo":  # its reference has followed the policy
        synced, start = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()["lm_head.weight"]
            for path in (folder / "whole" / "global_step_4" / "ref" / "huggingface", config.model.path)
        )
        assert not torch.equal(synced, start)
    assert f"step 4/4  loss {whole[-1]['actor/loss']:.3f}" in output
    weights = folder / "whole" / "global_step_4" / "actor" / "huggingface"
    assert AutoModelForCausalLM.from_pretrained(weights).num_parameters() and f"model.path={weights}" in output
    assert (folder / "whole" / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
