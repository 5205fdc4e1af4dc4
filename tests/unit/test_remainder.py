"""The quickstart task: reward, problems, tokenizer, files and a short warm start."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlfuse.files import write_lock
from rlfuse.tasks import prepare as tasks
from rlfuse.tasks.prepare import SETTINGS_FILE, VERSION, main, prepare
from rlfuse.tasks.remainder import (
    DIVISORS,
    LARGEST_NUMBER,
    QUOTIENTS,
    Problem,
    compute_score,
    draw_problems,
    solution,
    write_parquet,
)
from rlfuse.tasks.settings import Rows, WarmStart
from rlfuse.tasks.vocabulary import END, build_tokenizer
from rlfuse.tasks.warm_start import demonstration, warm_start

TINY = WarmStart(hidden_size=64, intermediate_size=64, layers=1, steps=30, tokens_per_batch=128)


def score(text, truth="5"):
    return compute_score("remainder", text, truth, {})


def test_solution_shows_every_subtraction():
    assert solution(20, 6) == "20 - 6 = 14 , 14 - 6 = 8 , 8 - 6 = 2 ; 2"
    assert solution(3, 6) == "; 3"
    assert solution(12, 6).endswith("6 - 6 = 0 ; 0")


def test_every_correct_solution_scores_one():
    for dividend in range(LARGEST_NUMBER + 1):
        for divisor in DIVISORS:
            parts = score(solution(dividend, divisor), str(dividend % divisor))
            assert parts == {"score": 1.0, "acc": 1.0, "format": 1.0}


@pytest.mark.parametrize(
    "text",
    [
        "",
        ";",
        "5",
        "11 - 6 = 5",
        "11 - 6 = 5 ; 4",
        "11 - 6 = 5 ; 5 5",
        "11 - 6 = 5 ; 5 ; 5",
        "; 0 ; 1 ; 2 ; 3 ; 4 ; 5",
        "; 5 ;",
        "; 05",
        "; +5",
        "; 5.0",
        "; \uff15",
        "; 5 , 11 - 6 = 5",
        "; 15",
        "; 5 <end>",
    ],
)
def test_other_endings_score_nothing(text):
    assert score(text)["score"] == score(text)["acc"] == 0.0


def test_format_is_independent_of_the_score():
    assert score("; 5") == {"score": 1.0, "acc": 1.0, "format": 1.0}
    assert score("nonsense ; 5") == {"score": 1.0, "acc": 1.0, "format": 0.0}
    assert score("11 - 6 = 4 ; 4") == {"score": 0.0, "acc": 0.0, "format": 1.0}
    assert score("11 - 6 = 5 , ; 5")["format"] == 0.0


@pytest.mark.parametrize("truth", [None, "five", "-1", 5.0])
def test_a_ground_truth_of_another_task_is_an_error_not_a_zero(truth):
    with pytest.raises(ValueError, match=r"ground_truth: got .*non-negative integer"):
        score("; 5", truth)


def test_training_and_validation_share_no_problem_under_any_seed():
    train = {problem for seed in range(3) for problem in draw_problems(2000, seed, held_out=False)}
    val = {problem for seed in range(3) for problem in draw_problems(500, seed + 5, held_out=True)}
    assert not train & val
    assert len(train) > 400 and len(val) > 80


def test_problems_are_a_function_of_the_seed_and_in_range():
    problems = draw_problems(300, 3, False)
    assert problems == draw_problems(300, 3, False) != draw_problems(300, 4, False)
    assert all(p.quotient in QUOTIENTS and p.divisor in DIVISORS for p in problems)
    assert max(p.dividend for p in problems) <= LARGEST_NUMBER


@pytest.mark.slow
def test_solutions_have_a_long_tail_and_fit_160_tokens():
    tokenizer = build_tokenizer()
    problems = draw_problems(4000, 1, held_out=False)
    texts = [f" {solution(p.dividend, p.divisor)}" for p in problems]
    lengths = np.array([len(ids) + 1 for ids in tokenizer(texts)["input_ids"]])
    median, tail = np.percentile(lengths, [50, 99])
    assert 20 <= median <= 30
    assert 130 <= tail <= 150 and tail >= 5 * median
    assert lengths.max() < 160


def test_tokenizer_round_trip_and_chat_template():
    tokenizer = build_tokenizer()
    text = " 47 mod 6 = 47 - 6 = 41 , 41 - 6 = 35 ; 35"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.split()) and tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    user = {"role": "user", "content": "47 mod 6 ="}
    prompt = tokenizer.apply_chat_template([user], add_generation_prompt=True, tokenize=False)
    assert prompt == " 47 mod 6 ="
    conversation = tokenizer.apply_chat_template([user, {"role": "assistant", "content": "; 5"}], tokenize=False)
    assert conversation == f" 47 mod 6 = ; 5{END}"
    assert tokenizer(conversation)["input_ids"][-1] == tokenizer.eos_token_id


def test_demonstrations_are_of_mixed_quality_and_correct_without_errors():
    rng, settings = np.random.default_rng(0), WarmStart()
    problems = draw_problems(1000, 2, held_out=False)
    scores = [score(demonstration(p, rng, settings), str(p.answer)) for p in problems]
    assert 0.3 < np.mean([parts["acc"] for parts in scores]) < 0.5
    assert all(parts["format"] == 1.0 for parts in scores)
    perfect = WarmStart(stop_early_small=0.0, stop_early_large=0.0)
    assert all(demonstration(p, rng, perfect) == solution(p.dividend, p.divisor) for p in problems)


def test_parquet_rows_have_the_format_of_verl(tmp_path):
    train, val = write_parquet(tmp_path, train_rows=20, val_rows=10, seed=1)
    rows, held_out = pq.read_table(train).to_pylist(), pq.read_table(val).to_pylist()
    assert (len(rows), len(held_out)) == (20, 10)
    for split, row in [*(("train", row) for row in rows), *(("val", row) for row in held_out)]:
        assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
        info = row["extra_info"]
        problem = Problem(info["dividend"], info["divisor"])
        assert row["prompt"] == [{"role": "user", "content": problem.prompt}]
        assert row["reward_model"] == {"style": "rule", "ground_truth": str(problem.answer)}
        assert info["split"] == split and problem.held_out == (split == "val")


@pytest.mark.slow
def test_a_short_warm_start_learns_and_restores_global_state(tmp_path):
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    losses = warm_start(tmp_path / "model", TINY)
    assert np.mean(losses[-5:]) < losses[0] - 1.0
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)
    assert warm_start(tmp_path / "again", TINY) == losses
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert model.config.architectures == ["Qwen2ForCausalLM"] and model.config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.decode(tokenizer(" 41 , 35 ; 5")["input_ids"]) == " 41 , 35 ; 5"
    assert tokenizer.chat_template == build_tokenizer().chat_template


@pytest.mark.slow
def test_prepare_reuses_its_output_and_rebuilds_for_other_settings(tmp_path, capsys):
    root = tmp_path / "cache" / "remainder"
    task = prepare(root, TINY, Rows(8, 4))
    assert task.train_file.is_file() and task.val_file.is_file() and (task.model_path / "config.json").is_file()
    assert "30/30 steps" in capsys.readouterr().out
    assert [path.name for path in root.parent.iterdir()] == ["remainder"]
    written = task.train_file.stat().st_mtime_ns
    assert prepare(root, TINY, Rows(8, 4)) == task
    assert task.train_file.stat().st_mtime_ns == written and capsys.readouterr().out == ""
    prepare(root, TINY, Rows(9, 4))
    assert pq.read_table(task.train_file).num_rows == 9
    assert [path.name for path in root.parent.iterdir()] == ["remainder"]


def test_a_second_process_that_prepares_a_folder_waits_for_the_first(tmp_path, capsys):
    root, built = tmp_path / "tasks" / "root", []

    def prepare_once():
        return tasks._kept(root, {"rows": 1}, built.append)

    with ThreadPoolExecutor(1) as other:
        with write_lock(root):
            second = other.submit(prepare_once)
            while "Waiting for another process that is writing" not in capsys.readouterr().out:
                time.sleep(0.001)
            assert not second.done()
            root.mkdir()
            (root / SETTINGS_FILE).write_text(json.dumps({"version": VERSION, "rows": 1}))
        assert second.result(60).root == root and not built, "it reuses the output of the first process"
    assert list(root.parent.iterdir()) == [root]


def test_prepare_does_not_overwrite_other_folders(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"--out: .* was not written by `rlfuse prepare`"):
        prepare(tmp_path, TINY)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_failed_build_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr("rlfuse.tasks.warm_start.train", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(tmp_path / "root", TINY)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_command_prints_the_paths_of_its_output(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlfuse.tasks.prepare.WarmStart", lambda: TINY)
    main(["quickstart"])
    out = capsys.readouterr().out
    assert ".cache/rlfuse/remainder/train.parquet" in out and ".cache/rlfuse/remainder/model" in out
    settings = json.loads((tmp_path / ".cache/rlfuse/remainder/settings.json").read_text())
    assert settings["warm_start"]["steps"] == TINY.steps
    assert str(tmp_path) not in out
