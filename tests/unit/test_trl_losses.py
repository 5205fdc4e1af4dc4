"""Losses, gradients and metrics of sft and dpo equal those of TRL's trainers on the same rows, in all layouts."""

import copy
import json
from importlib.util import find_spec

import pytest
import torch

from rlfuse.config.schema import Config, DataConfig, ModelConfig
from rlfuse.data.demonstrations import load_demonstrations
from rlfuse.data.preferences import load_policy_preferences
from rlfuse.engines.trainer.micro_batch_losses import POLICY_LOSSES, log_probs
from rlfuse.engines.trainer.model_inputs import collate
from rlfuse.engines.trainer.models import prepare_for_training
from rlfuse.samples import Row
from rlfuse.tasks.settings import WarmStart
from rlfuse.tasks.vocabulary import build_tokenizer
from rlfuse.tasks.warm_start import build_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed; it is in the extra `dev`"),
]
MARKED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %} "
    "{{ message['content'] | trim }}{{ eos_token }}{% endgeneration %}{% else %} {{ message['content'] | trim }}"
    "{% endif %}{% endfor %}"
)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


CHATS = [
    {"prompt": [user("20 mod 6 =")], "completion": [assistant("20 - 6 = 14 , 14 - 6 = 8 , 8 - 6 = 2 ; 2")]},
    {"prompt": [user("7 mod 6 =")], "completion": [assistant("; 1")]},
    {"prompt": [user("9 mod 2 ="), assistant("3"), user("8 mod 3 =")], "completion": [assistant("8 - 3 = 5 ; 2")]},
]
TEXTS = [{"prompt": " 20 mod 6 =", "completion": " 14 ; 2"}, {"prompt": " 7 mod 6 =", "completion": " ; 1 <end>"}]
TURNS = [{"messages": [*row["prompt"], *row["completion"], user("9 mod 3 ="), assistant("; 0")]} for row in CHATS]
PAIRS = [
    {"prompt": row["prompt"], "chosen": row["completion"], "rejected": [assistant(other)]}
    for row, other in zip(CHATS, ("20 - 6 = 14 ; 14", "; 2 , 3", "; 5"), strict=True)
]


def make_model(seed):
    torch.manual_seed(seed)
    model = build_model(WarmStart(hidden_size=64, intermediate_size=64), build_tokenizer())
    with torch.no_grad():  # a new model has near-identity layers and near-uniform log-probs
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


def trl_result(trainer):
    """Return (loss, gradients, metrics) of a TRL trainer on all its rows."""
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return float(loss.detach()), gradients(trainer.model), metrics


def gradients(model):
    return torch.cat([each.grad.flatten() for _, each in sorted(model.named_parameters())])


def rlfuse_result(config, model, rows, count, packed, shared):
    model = prepare_for_training(copy.deepcopy(model), ModelConfig(dtype="float32"))
    loss, sums = POLICY_LOSSES[config.trainer.task](config, model, collate(rows, packed, shared=shared))
    (loss / count).backward()
    return float(loss.detach()) / count, gradients(model), {name: float(each) / count for name, each in sums.items()}


def assert_equal(found, expected):
    """Compare loss, metrics and gradients with a relative tolerance of 1e-5."""
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert float((found[1] - expected[1]).norm() / expected[1].norm()) < 1e-5
    named = {name.removeprefix("actor/"): value for name, value in found[2].items() if name != "loss"}
    assert named == pytest.approx({name: expected[2][name] for name in named}, rel=1e-5, abs=1e-6)


LAYOUTS = [(False, False), (True, False), (True, True)]
"""(packed, shared prompts)."""


def options(kind, tmp_path, rows, **more):
    return kind(output_dir=str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[],
                max_length=None, per_device_train_batch_size=len(rows), disable_tqdm=True, **more)  # fmt: skip


def write_rows(tmp_path, rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(path)]


@pytest.mark.parametrize(
    ("rows", "template", "settings", "ours"),
    [
        (CHATS, None, {}, {}),
        (TEXTS, None, {}, {"prompt_is_chat": False}),
        (TURNS, MARKED, {"assistant_only_loss": True}, {}),
        (CHATS, MARKED, {"assistant_only_loss": True, "completion_only_loss": True}, {}),
    ],
    ids=["chats", "texts", "marked turns", "marked completions"],
)
def test_supervised_fine_tuning(tmp_path, rows, template, settings, ours):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    tokenizer, model, config = build_tokenizer(), make_model(0), Config()
    tokenizer.chat_template = template or tokenizer.chat_template
    config.trainer.task = "sft"
    found, _ = load_demonstrations(write_rows(tmp_path, rows), tokenizer, DataConfig(train_files=[], **ours))
    trainer = SFTTrainer(
        model=copy.deepcopy(model),
        args=options(SFTConfig, tmp_path, rows, **settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    assert [(each["input_ids"], [label != -100 for label in each["labels"]]) for each in trainer.train_dataset] == [
        (each.ids.tolist(), each.mask.tolist()) for each in found
    ]
    expected, count = trl_result(trainer), sum(int(each.mask.sum()) for each in found)
    for layout in LAYOUTS:
        assert_equal(rlfuse_result(config, model, [each.row for each in found], count, *layout), expected)


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_direct_preference_optimisation(tmp_path, loss_type):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    tokenizer, model, reference, config = build_tokenizer(), make_model(0), make_model(1), Config()
    config.trainer.task, config.dpo.loss_type, config.dpo.beta = "dpo", loss_type, 0.2
    found, _ = load_policy_preferences(write_rows(tmp_path, PAIRS), tokenizer, DataConfig(train_files=[]))
    trainer = DPOTrainer(
        model=copy.deepcopy(model),
        ref_model=copy.deepcopy(reference),
        args=options(DPOConfig, tmp_path, PAIRS, loss_type=loss_type, beta=0.2),
        train_dataset=Dataset.from_list(PAIRS),
        processing_class=tokenizer,
    )
    sides = ("prompt_ids", "chosen_ids", "rejected_ids")
    assert [[each[side] for side in sides] for each in trainer.train_dataset] == [
        [ids.tolist() for ids in (pair.shared_ids, pair.chosen_ids, pair.rejected_ids)] for pair in found
    ]
    expected, rows = trl_result(trainer), [row for pair in found for row in pair.rows]
    for layout in LAYOUTS:
        packed = collate(rows, layout[0], shared=layout[1])
        with torch.no_grad():
            reference_model = prepare_for_training(copy.deepcopy(reference), ModelConfig(dtype="float32"))
            scores = packed.split(log_probs(config, reference_model, packed))
        scored_rows = [
            Row(row.prompt_ids, row.response_ids, {"ref_log_probs": each})
            for row, each in zip(rows, scores, strict=True)
        ]
        assert_equal(rlfuse_result(config, model, scored_rows, len(found), *layout), expected)
