"""Preference pairs from files, the Bradley-Terry loss, calibration, and the labeller of the remainder task."""

import json
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from rlfuse.algorithms.preferences import bradley_terry, calibrate
from rlfuse.config.checks import check
from rlfuse.config.facts import Facts
from rlfuse.config.reward_labels import ONLY_LABEL
from rlfuse.config.schema import Config, DataConfig
from rlfuse.data.preferences import load_preferences, make_preference
from rlfuse.engines.trainer.micro_batch_losses import preference_loss
from rlfuse.engines.trainer.model_inputs import collate
from rlfuse.errors import DataError
from rlfuse.observe.calibration_plot import draw_calibration
from rlfuse.observe.offline_summary import summarise_offline
from rlfuse.observe.overoptimization import draw_overoptimization, draw_overoptimization_panels
from rlfuse.rewards.api.items import item_of_row
from rlfuse.rewards.models.classifier import Transformers
from rlfuse.run.offline.reward_model import rows_of
from rlfuse.tasks.preferences import answers, preference_row, prefers_first
from rlfuse.tasks.remainder import compute_score, draw_problems
from rlfuse.tasks.response_pairs import write_pairs
from rlfuse.tasks.settings import Labeller
from rlfuse.tasks.vocabulary import build_tokenizer

PROMPT = {"role": "user", "content": "20 mod 6 ="}
GOOD, BAD = "20 - 6 = 14 , 14 - 6 = 8 , 8 - 6 = 2 ; 2", "20 - 6 = 14 ; 14"


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def message(text):
    return {"role": "assistant", "content": text}


def load(tmp_path, tokenizer, *rows, **settings):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_preferences([str(path)], tokenizer, DataConfig(train_files=[], **settings))


@pytest.mark.parametrize("template", ["as it is", "none"])
@pytest.mark.parametrize("padding", ["another token", "end of sequence"])
def test_responses_are_scored_with_the_tokens_of_training(tmp_path, template, padding):
    tokenizer = build_tokenizer()
    if template == "none":
        tokenizer.chat_template = None
    if padding == "end of sequence":
        tokenizer.pad_token = tokenizer.eos_token
    rows = [{"prompt": [PROMPT], "chosen": [message(GOOD)], "rejected": [message(BAD)]}]
    rows += [{"chosen": [PROMPT, message(GOOD)], "rejected": [PROMPT, message(BAD)]}]
    for pair in load(tmp_path, tokenizer, *rows)[0]:
        for answer, ids in ((GOOD, pair.chosen_ids), (BAD, pair.rejected_ids)):
            item = replace(
                item_of_row({"prompt": [PROMPT], "response": answer}), prompt_text="<the policy's> 20 mod 6 ="
            )
            assert Transformers.encode(None, item, tokenizer).tokens == (*pair.shared_ids, *ids)
            assert ids[-1] != tokenizer.pad_token_id


CONVERSATIONS = {
    "a system message": ([{"role": "system", "content": "count"}, PROMPT], GOOD),
    "two turns": ([PROMPT, message(BAD), PROMPT], GOOD),
    "three turns": ([PROMPT, message(BAD), PROMPT, message(GOOD), PROMPT], BAD),
    "a question with line breaks": ([PROMPT | {"content": "\n 20 mod 6 =\n\n"}], GOOD),
    "an empty question": ([PROMPT | {"content": ""}], GOOD),
    "two numbers": ([PROMPT], "12 34"),
    "spaces": ([PROMPT], "  2  "),
    "line breaks": ([PROMPT], "\n2\n\n"),
    "the text of the padding token": ([PROMPT], "2 <pad>"),
    "the text of the end of a sequence": ([PROMPT], "2 <eos>"),
    "an equation": ([PROMPT], "20 mod 6 = 2"),
    "a long answer": ([PROMPT], GOOD * 30),
}


@pytest.mark.parametrize("template", ["as it is", "none"])
@pytest.mark.parametrize("padding", ["another token", "end of sequence"])
@pytest.mark.parametrize("case", CONVERSATIONS)
def test_other_conversations_are_scored_with_the_tokens_of_training(tmp_path, case, template, padding):
    tokenizer, (prompt, answer) = build_tokenizer(), CONVERSATIONS[case]
    if template == "none":
        tokenizer.chat_template = None
    if padding == "end of sequence":
        tokenizer.pad_token = tokenizer.eos_token
    row = {"prompt": prompt, "chosen": [message(answer)], "rejected": [message(" 7 7 7")]}
    (pair,), _ = load(tmp_path, tokenizer, row, max_prompt_length=2000, max_response_length=2000)
    item = replace(item_of_row({"prompt": prompt, "response": answer}), prompt_text="<the policy's>")
    assert Transformers.encode(None, item, tokenizer).tokens == (*pair.shared_ids, *pair.chosen_ids)


def test_every_shape_of_a_conversation_gives_the_same_tokens(tmp_path, tokenizer):
    pairs, report = load(
        tmp_path,
        tokenizer,
        {"prompt": [PROMPT], "chosen": [message(GOOD)], "rejected": [message(BAD)]},
        {"prompt": PROMPT["content"], "chosen": f" {GOOD}", "rejected": BAD, "margin": 0.5},
        {"prompt": PROMPT["content"], "chosen": [PROMPT, message(GOOD)], "rejected": [PROMPT, message(BAD)]},
        {"chosen": [PROMPT, message(GOOD)], "rejected": [PROMPT, message(BAD)]},
        {
            "prompt": json.dumps([PROMPT]),
            "chosen": json.dumps([message(GOOD)]),
            "rejected": json.dumps([message(BAD)]),
        },
        {"chosen": json.dumps([PROMPT, message(GOOD)]), "rejected": json.dumps([PROMPT, message(BAD)])},
        {"prompt": [PROMPT, message("20 -")], "chosen": [message(GOOD[4:])], "rejected": [message(BAD[4:])]},
        {"chosen": f" 20 mod 6 = {GOOD}<end>", "rejected": f" 20 mod 6 = {BAD}<end>"},
    )
    assert report.startswith("data  8 pairs from")
    assert [pair.margin for pair in pairs] == [0, 0.5, 0, 0, 0, 0, 0, 0]
    for pair in pairs:
        assert tokenizer.decode(pair.shared_ids) == " 20 mod 6 = 20 - 6 = 14"
        assert tokenizer.decode(np.concatenate([pair.shared_ids, pair.chosen_ids])) == f" 20 mod 6 = {GOOD}<end>"
        assert tokenizer.decode(pair.rejected_ids) == " ; 14<end>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": " 1"}, "field rejected: None where a non-empty string or list"),
        ({"chosen": "", "rejected": "b"}, "field chosen: '' where"),
        ({"chosen": [{"role": "user"}], "rejected": "b"}, r"field chosen\[0\]: .* is not a message"),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, "field prompt: 3 where"),
        ({"chosen": " 1", "rejected": " 2", "margin": "big"}, "field margin: 'big'; expected a finite number"),
        ({"chosen": " 1", "rejected": " 2", "margin": float("nan")}, "field margin: nan"),
        ({"chosen": " 1", "rejected": " 1"}, "chosen and rejected are equal"),
        ({"chosen": " 1" * 40, "rejected": " 1"}, "a sequence has 40 tokens.* is 20.*filter_overlong_prompts"),
        ({"chosen": "<pad>", "rejected": " 1"}, "field chosen: .*has no tokens"),
        ({"prompt": "1", "chosen": "[{'role': 'assistant'}]", "rejected": " 1"}, "field chosen: .* is not JSON"),
        ({"prompt": "1", "chosen": " 1", "rejected": " 2", "tools": 3}, "field tools: 3 where"),
    ],
)
def test_invalid_rows_are_reported_with_file_row_and_field(tmp_path, tokenizer, row, message):
    good = {"chosen": " 1 , 2", "rejected": " 3"}
    with pytest.raises(DataError, match=rf"pairs.jsonl, line 2.*{message}"):
        load(tmp_path, tokenizer, good, row, max_prompt_length=10, max_response_length=10)


def test_long_pairs_are_filtered_if_configured(tmp_path, tokenizer):
    rows = {"chosen": " 1" * 40, "rejected": " 1"}, {"chosen": " 1 , 2", "rejected": " 3"}
    limits = {"max_prompt_length": 10, "max_response_length": 10, "filter_overlong_prompts": True}
    pairs, report = load(tmp_path, tokenizer, *rows, **limits)
    assert len(pairs) == 1 and "1 dropped (over 20 tokens)" in report
    with pytest.raises(DataError, match="no pairs are left; all 1 are longer than 20 tokens"):
        load(tmp_path, tokenizer, rows[0], **limits)


def test_each_answer_keeps_at_least_one_token():
    pair = make_preference(0, [5, 6], [5, 6, 7])
    assert [ids.tolist() for ids in (pair.shared_ids, pair.chosen_ids, pair.rejected_ids)] == [[5], [6], [6, 7]]


def test_bradley_terry_loss_with_margin():
    chosen, rejected = torch.tensor([1.0, 0.0], requires_grad=True), torch.tensor([0.0, 2.0])
    loss, sums = bradley_terry(chosen, rejected, torch.tensor([0.0, 1.0]))
    probabilities = 1 / (1 + np.exp(-np.array([1.0, -3.0])))
    assert float(loss.detach()) == pytest.approx(-np.log(probabilities).sum())
    loss.backward()
    np.testing.assert_allclose(chosen.grad, probabilities - 1, rtol=1e-6)
    assert {name: float(value) for name, value in sums.items()} == pytest.approx(
        {"loss": float(loss.detach()), "acc": 1.0, "margin": -1.0, "chosen": 1.0, "rejected": 2.0}
    )


class Sums(torch.nn.Module):
    """Model whose score of a token is the sum of tokens up to it, within its segment and shared prefix."""

    def forward(self, input_ids, layout, **_):
        flat, found = input_ids.flatten().double(), []
        for segment in layout.segments:
            before = flat[slice(*segment.prefix)].sum() if segment.prefix else 0.0
            found.append(before + flat[segment.start : segment.stop].cumsum(0))
        return type("Output", (), {"logits": torch.cat(found).view(*input_ids.shape, 1) / 10})


@pytest.mark.parametrize(("packed", "shared"), [(False, False), (True, False), (True, True)])
def test_pairs_are_scored_at_their_last_tokens_in_any_layout(packed, shared):
    pairs = [
        make_preference(0, [3, 4, 5], [3, 4, 9, 9], 0.25),
        make_preference(1, [3, 8], [3, 4, 4, 4]),
        make_preference(2, [7], [6]),
    ]
    loss, sums = preference_loss(Config(), Sums(), collate(rows_of(pairs, [ONLY_LABEL]), packed, shared=shared))
    chosen, rejected = torch.tensor([1.2, 1.1, 0.7]), torch.tensor([2.5, 1.5, 0.6])
    expected, _ = bradley_terry(chosen, rejected, torch.tensor([0.25, 0.0, 0.0]))
    assert float(loss) == pytest.approx(float(expected), rel=1e-5) and float(sums["acc"]) == 1
    filler, sums = preference_loss(Config(), Sums(), collate(rows_of(pairs, [ONLY_LABEL])[:1], packed, shared=shared))
    assert float(filler) == 0.0 and not any(sums.values())


def test_calibration_of_calibrated_scores():
    rng = np.random.default_rng(0)
    sure = rng.normal(0, 2, 20_000)
    gaps = np.where(rng.random(20_000) < 1 / (1 + np.exp(-sure)), sure, -sure)
    calibrated, overconfident = calibrate(gaps), calibrate(4 * gaps)
    assert calibrated.ece < 0.02 < 0.1 < overconfident.ece
    assert calibrated.accuracy == overconfident.accuracy == (gaps > 0).mean()
    assert calibrated.counts.sum() == 20_000 and np.all(np.diff(calibrated.accuracies) > 0)
    assert calibrated.loss < overconfident.loss


def test_calibration_of_known_values():
    found = calibrate(np.array([0.0, 0.0, 5.0, -5.0, 5.0, 5.0]), bins=2)
    assert found.counts.tolist() == [2, 4] and found.accuracies.tolist() == [0.5, 0.75]
    sure = 1 / (1 + np.exp(-5.0))
    assert found.ece == pytest.approx(4 / 6 * (sure - 0.75)) and found.accuracy == pytest.approx(4 / 6)
    assert np.isnan(calibrate(np.array([5.0])).accuracies[0])
    with pytest.raises(ValueError, match="got 2 values, 1 finite"):
        calibrate(np.array([1.0, np.nan]))


@pytest.mark.slow
def test_plots_and_summary_show_logged_values(tmp_path, capsys):
    gaps = np.linspace(-1, 3, 50)
    draw_calibration(tmp_path / "calibration.png", calibrate(gaps), gaps)
    rows = [{"step": i, "val-core/reward_model/acc": 0.5 + i / 10, "val-aux/reward_model/ece": 0.1} for i in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = summarise_offline(tmp_path, "reward_model", 1.0)
    assert (summary["val_before"], summary["val_after"], summary["steps"]) == (0.5, 0.7, 2)
    assert "0.500 -> 0.700" in capsys.readouterr().out
    names = ("val-core/r/acc/mean@1", "val-aux/r/reward_model/mean@1", "rewards/reward_model/mean")
    rows = [{"step": i, **dict.fromkeys(names[: 2 + (i > 0)], i / 4)} for i in range(4)]
    picture = draw_overoptimization(tmp_path, rows)
    for path in (picture, tmp_path / "calibration.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    assert draw_overoptimization(tmp_path, [{"step": 1, names[0]: 0.5}]) is None
    with pytest.raises(ValueError, match="second: the validation metrics lack a reward model score"):
        draw_overoptimization_panels({"first": rows, "second": [{"step": 1, names[0]: 0.5}]}, tmp_path / "both.png")


def test_labeller_prefers_correct_and_long_responses():
    rng, problems = np.random.default_rng(3), draw_problems(600, 5, held_out=False)
    truth = [[compute_score("", text, p.answer)["score"] for text in answers(p, rng)] for p in problems]
    assert 0.4 < np.mean(truth) < 0.7 and all(first != second for first, second in (answers(p, rng) for p in problems))
    problem, sure = problems[0], Labeller(certainty=50.0, per_step=0.0)
    right, wrong = (f"{problem.dividend} - 0 = 1 ; {problem.answer + more}" for more in (0, 1))
    assert prefers_first(problem, right, wrong, sure, rng) and not prefers_first(problem, wrong, right, sure, rng)
    assert prefers_first(problem, f"= {right}", right, Labeller(per_step=50.0), rng)
    rows = [preference_row(p, Labeller(), rng) for p in problems]
    chosen, rejected = np.array([row["true_scores"] for row in rows]).T
    assert 0.85 < (chosen > rejected).sum() / (chosen != rejected).sum() < 1


def test_pairs_of_scored_responses_prefer_the_higher_reward(tmp_path):
    path, rewards = tmp_path / "responses.jsonl", {"one": 1.0, "half": 0.5, "none": 0.0, "unscored": None}
    with path.open("w") as file:
        for number in range(20):
            columns = {"prompt": [{"role": "user", "content": f"question {number}"}]}
            for text, reward in rewards.items():
                row = {"prompt": f"<user>question {number}", "response": text, "reward": reward, "columns": columns}
                file.write(json.dumps(row) + "\n")
    write_pairs(tmp_path, path)
    train, val = (pq.read_table(tmp_path / f"{name}.parquet").to_pylist() for name in ("train", "val"))
    assert (len(train), len(val)) == (18 * 3, 2 * 3)
    pairs = [(row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in train + val]
    assert set(pairs) == {("one", "half"), ("one", "none"), ("half", "none")}
    assert not {row["prompt"][0]["content"] for row in train} & {row["prompt"][0]["content"] for row in val}
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match="responses to 11 or more prompts need different rewards"):
        write_pairs(tmp_path, path)


def test_reward_model_settings_are_checked_and_rollout_settings_are_not():
    config = Config()
    config.data.train_files, config.model.path, config.trainer.task = ["pairs.parquet"], "model", "reward_model"
    config.actor.ppo_mini_batch_size = 7  # used by RL training only
    assert check(config, Facts()) == []
    config.data.train_batch_size, config.trainer.n_gpus_per_node, config.training.pipeline_parallel_size = 1, 2, 2
    pipeline, batch = check(config, Facts())
    assert pipeline.startswith("training.pipeline_parallel_size=2: must be 1 with trainer.task=reward_model")
    assert batch.startswith("data.train_batch_size=1: must be at least 2, one row per slot")
    config = Config()
    config.data.train_files, config.model.path, config.trainer.task = ["pairs.parquet"], "model", "reward_model"
    config.trainer.metrics, config.data.prompt_is_chat = ["mine.py:groups"], False
    config.data.apply_chat_template_kwargs = {"enable_thinking": False}
    metrics, *template = check(config, Facts())
    assert [each.partition("=")[0] for each in template] == ["data.apply_chat_template_kwargs", "data.prompt_is_chat"]
    assert metrics.startswith("trainer.metrics=[mine.py:groups]: must be empty with trainer.task=reward_model")
    config = Config(trainer=type(config.trainer)(task="reward"))
    assert any("did you mean" in problem for problem in check(config, Facts()) if problem.startswith("trainer.task"))
