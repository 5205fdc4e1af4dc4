"""Tokens and loss masks of demonstrations and preference pairs, read from files; the DPO loss."""

import json

import numpy as np
import pytest
import torch

from rlfuse.algorithms.preferences import dpo
from rlfuse.config.checks import check
from rlfuse.config.facts import Facts
from rlfuse.config.schema import Config, DataConfig
from rlfuse.data.demonstrations import load_demonstrations
from rlfuse.data.preferences import load_policy_preferences
from rlfuse.errors import DataError
from rlfuse.observe.offline_metrics import OFFLINE
from rlfuse.observe.terminal import step_line
from rlfuse.run.offline.training import TASKS
from rlfuse.tasks.vocabulary import build_tokenizer

BODY = " {{ message['content'] | trim }}"
MARKED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}"
    + BODY
    + "{{ eos_token }}{% endgeneration %}{% else %}"
    + BODY
    + "{% endif %}{% endfor %}"
)
ENDED_ONCE = "{% for message in messages %}" + BODY + "{% if loop.last %}{{ eos_token }}{% endif %}{% endfor %}"


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def load(tmp_path, *rows, template=None, loader=load_demonstrations, **settings):
    tokenizer, path = build_tokenizer(), tmp_path / "rows.jsonl"
    tokenizer.chat_template = None if template == "none" else template or tokenizer.chat_template
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return loader([str(path)], tokenizer, DataConfig(train_files=[], **settings))


QUESTION, ANSWER = user("20 mod 6 ="), assistant("14 ; 2")
TURNS = [QUESTION, ANSWER, user("5"), assistant("6")]


@pytest.mark.parametrize("template", [None, MARKED], ids=["prefixes", "marks"])
@pytest.mark.parametrize(
    ("row", "whole"),
    [
        ({"messages": TURNS}, " 20 mod 6 =[ 14 ; 2<end>] 5[ 6<end>]"),
        ({"messages": json.dumps(TURNS)}, " 20 mod 6 =[ 14 ; 2<end>] 5[ 6<end>]"),
        ({"prompt": TURNS[:1], "completion": TURNS[1:]}, " 20 mod 6 =[ 14 ; 2<end>] 5[ 6<end>]"),
        ({"prompt": TURNS[:3], "completion": TURNS[3:]}, " 20 mod 6 = 14 ; 2<end> 5[ 6<end>]"),
        ({"prompt": TURNS[:3], "completion": TURNS}, " 20 mod 6 = 14 ; 2<end> 5[ 6<end>]"),
        ({"prompt": "20 mod 6 =", "completion": "14 ; 2"}, " 20 mod 6 =[ 14 ; 2<end>]"),
        ({"messages": [assistant("5"), assistant("6")]}, " 5[<end>][ 6<end>]"),  # no logit predicts the first token
    ],
)
def test_the_loss_mask_covers_the_assistant_tokens(tmp_path, row, whole, template):
    (found,), report = load(tmp_path, row, template=template)
    assert report.startswith("data  1 demonstrations from")
    pieces = whole.replace("]", "[").split("[")
    texts, masks = pieces[::2], pieces[1::2]
    assert build_tokenizer().decode(found.ids) == whole.replace("[", "").replace("]", "")
    assert build_tokenizer().decode(found.ids[found.mask]) == "".join(masks)
    assert build_tokenizer().decode(found.ids[~found.mask]) == "".join(texts)
    row = found.row
    assert found.ids.tolist()[: row.tokens] == [*row.prompt_ids.tolist(), *row.response_ids.tolist()]
    assert row.length == found.mask.sum() and row.mask[0] and row.mask[-1]


@pytest.mark.parametrize(("template", "is_chat"), [(None, False), ("none", True)])
def test_texts_end_with_one_eos_token(tmp_path, template, is_chat):
    rows = [{"prompt": " 20 mod", "completion": text} for text in (" 6 = 2", " 6 = 2<end>")]
    for found in load(tmp_path, *rows, template=template, prompt_is_chat=is_chat)[0]:
        assert build_tokenizer().decode(found.ids) == " 20 mod 6 = 2<end>" and found.mask.tolist() == [0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"text": "5"}, {}, "has neither messages nor completion. A demonstration has either"),
        ({"messages": TURNS, "completion": "5"}, {}, "has messages and completion"),
        ({"completion": "5"}, {}, "field prompt: missing; a completion needs its prompt"),
        ({"messages": 3}, {}, "field messages: 3 where"),
        ({"messages": [{"role": "user"}]}, {}, r"field messages\[0\]: .* is not a message"),
        ({"messages": [QUESTION]}, {}, "field messages: no message is the assistant's"),
        ({"prompt": TURNS[:2], "completion": "5"}, {}, "field prompt: the last message is the assistant's. Move it"),
        ({"messages": TURNS, "tools": 3}, {}, "field tools: 3 where"),
        ({"messages": TURNS}, {"template": ENDED_ONCE}, r"field messages\[2\]: .* has other tokens alone \('<end>'"),
        ({"messages": TURNS}, {"template": "none"}, "field messages: model.path has no chat template for messages"),
        ({"messages": TURNS}, {"template": "{{ 1 / 0 }}"}, "field messages: the chat template of model.path raised"),
        ({"prompt": "5", "completion": [ANSWER]}, {"prompt_is_chat": False}, "expected a non-empty string, as the"),
        (
            {"messages": [QUESTION, assistant("6 " * 40)]},
            {},
            "a sequence has 45 tokens.* is 20.*filter_overlong_prompts",
        ),
    ],
)
def test_an_invalid_row_is_reported_by_file_row_and_field(tmp_path, row, settings, message):
    settings = {"max_prompt_length": 10, "max_response_length": 10} | settings
    with pytest.raises(DataError, match=rf"rows.jsonl, line 1.*{message}"):
        load(tmp_path, row, **settings)


def test_long_demonstrations_are_filtered_if_configured(tmp_path):
    limits = {"max_prompt_length": 5, "max_response_length": 5, "filter_overlong_prompts": True}
    rows = {"messages": [QUESTION, assistant("6 " * 40)]}, {"messages": [QUESTION, assistant("2")]}
    found, report = load(tmp_path, *rows, **limits)
    assert len(found) == 1 and "1 dropped (over 10 tokens)" in report
    with pytest.raises(DataError, match="no demonstrations are left; all 1 are longer than 10 tokens"):
        load(tmp_path, rows[0], **limits)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [assistant("14 ; 3")]},
        {"prompt": "20 mod 6 =", "chosen": "14 ; 2", "rejected": "14 ; 3"},
        {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, assistant("14 ; 3")]},
        {"prompt": [QUESTION], "chosen": [QUESTION, ANSWER], "rejected": [QUESTION, assistant("14 ; 3")]},
    ],
)
def test_policy_preference_pairs_have_a_loss_on_whole_completions(tmp_path, row):
    pairs, _ = load(tmp_path, row, loader=load_policy_preferences)
    decode = build_tokenizer().decode
    assert [(decode(each.prompt_ids), decode(each.response_ids), each.id) for pair in pairs for each in pair.rows] == [
        (" 20 mod 6 =", " 14 ; 2<end>", "0/chosen"),
        (" 20 mod 6 =", " 14 ; 3<end>", "0/rejected"),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "5", "chosen": "6"}, "field rejected: None where a non-empty string or list"),
        ({"prompt": "5", "chosen": "6", "rejected": "6"}, "chosen and rejected are equal. Remove the row"),
        ({"chosen": "5 6", "rejected": "5 7"}, "field prompt: missing; chosen is a text, whose prompt is not known"),
        ({"chosen": [ANSWER], "rejected": [assistant("3")]}, "have no first message in common. Add a column prompt"),
    ],
)
def test_an_invalid_pair_is_reported_by_file_row_and_field(tmp_path, row, message):
    with pytest.raises(DataError, match=rf"rows.jsonl, line 1.*{message}"):
        load(tmp_path, row, loader=load_policy_preferences)


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_dpo_loss_equals_the_formula_of_the_paper(loss_type):
    policy = torch.tensor([[-3.0, -5.0], [-2.0, -1.0]], requires_grad=True)
    reference, lengths, beta = torch.tensor([[-4.0, -4.5], [-2.5, -2.5]]), torch.tensor([[2.0, 4.0], [1.0, 5.0]]), 0.5
    loss, sums = dpo(policy, reference, lengths, beta, loss_type)
    ratios = (policy - reference).detach().numpy()
    if loss_type == "sigmoid":
        margins = beta * (ratios[:, 0] - ratios[:, 1])
        expected, slope = np.log1p(np.exp(-margins)).sum(), -beta / (1 + np.exp(margins))
        gradient = np.stack([slope, -slope], 1)
    else:
        gaps = (ratios / lengths.numpy()) @ [1.0, -1.0] - 1 / (2 * beta)
        expected, gradient = (gaps**2).sum(), 2 * gaps[:, None] * [1.0, -1.0] / lengths.numpy()
    loss.backward()
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(policy.grad, gradient, rtol=1e-5)
    rewards = beta * ratios
    assert {name: float(value) for name, value in sums.items()} == pytest.approx(
        {
            "loss": expected,
            "rewards/accuracies": (rewards[:, 0] > rewards[:, 1]).sum(),
            "rewards/margins": (rewards[:, 0] - rewards[:, 1]).sum(),
            "rewards/chosen": rewards[:, 0].sum(),
            "rewards/rejected": rewards[:, 1].sum(),
            "logps/chosen": -5.0,
            "logps/rejected": -6.0,
        }
    )


@pytest.mark.parametrize("task", TASKS)
def test_settings_without_effect_in_an_offline_task_are_refused_together(task):
    config = Config()
    config.data.train_files, config.model.path, config.trainer.task = ["rows.parquet"], "model", task
    config.actor.ppo_mini_batch_size, config.reward.functions = 7, ["used only by RL"]
    assert check(config, Facts()) == [] and not config.uses_critic and config.uses_reference == (task == "dpo")
    config.rollout.temperature, config.trainer.metrics, config.cluster.drain = 0.7, ["mine.py:groups"], [0]
    config.training.pipeline_parallel_size = config.trainer.n_gpus_per_node = 2
    names = {"cluster.drain", "trainer.metrics", "training.pipeline_parallel_size"}
    names |= {"rollout.temperature"} if task != "reward_model" else set()
    assert {problem.partition("=")[0] for problem in check(config, Facts())} == names
    config.dpo.beta, config.dpo.loss_type = 0.0, "hinge"
    assert {"dpo.beta", "dpo.loss_type"} <= {problem.partition("=")[0] for problem in check(config, Facts())}


@pytest.mark.parametrize(
    ("task", "line"),
    [
        ("sft", "loss 0.500  mean_token_accuracy 0.500  grad_norm 0.500  held out: 0.500"),
        ("dpo", "loss 0.500  rewards/accuracies 0.500  rewards/margins 0.500  grad_norm 0.500  held out: 0.500"),
        ("reward_model", "loss 0.500  acc 0.500  margin 0.500  grad_norm 0.500  held out: 0.500"),
    ],
)
def test_the_line_of_a_step_has_the_metrics_of_its_task(task, line):
    metrics = dict.fromkeys([*OFFLINE[task].fields(), OFFLINE[task].validation], 0.5)
    assert step_line(3, 9, metrics | {"perf/time_per_step": 2.0}) == f"step 3/9  {line.replace(':', '')}  2.0 s"
