"""Custom metrics of a step's samples: the documented example, logging, and errors of metric functions."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_journal import finished, log_in, run_step, sink  # noqa: F401
from transformers import Qwen2Config

from rlfuse.config.checks import check
from rlfuse.config.facts import read_facts
from rlfuse.config.schema import Config
from rlfuse.errors import ConfigError
from rlfuse.observe import custom_metrics
from rlfuse.observe.custom_metrics import CustomMetrics
from rlfuse.observe.terminal import step_line
from rlfuse.observe.tracking import read_metrics
from rlfuse.run.build import _attempt
from rlfuse.run.job import Job
from rlfuse.samples import Group, Reward, RewardFailure
from rlfuse.tasks.remainder import write_parquet
from rlfuse.tasks.vocabulary import build_tokenizer

PAGE = Path(__file__).parents[2] / "rlfuse/observe/README.md"


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda text: Path("mine.py").write_text(text)


def metrics(*names):
    """Return the metrics of these functions of `mine.py`, and the list of messages about them."""
    config, messages = Config(), []
    config.trainer.metrics = [f"mine.py:{name}" for name in names]
    return CustomMetrics(config, messages.append), messages


def problems(*names):
    config = Config()
    config.trainer.metrics, config.model.path, config.data.train_files = list(names), "m", ["a"]
    return [each for each in check(config, read_facts(config)) if each.startswith("trainer.metrics")]


def samples(*rewards):
    """Return one sample for each reward, of different prompts."""
    return [finished(4, number, reward) for number, reward in enumerate(rewards)]


def block(language):
    return re.search(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]


def test_the_documented_metric_against_manual_values(write):
    write(block("python"))
    named = re.search(r"trainer\.metrics=\[(.*?)\]", PAGE.read_text())[1]
    assert problems(named) == []
    custom, messages = metrics(named.partition(":")[2])
    one, two, three = samples(Reward(1.0), Reward(0.0), RewardFailure("judge", "timed out"))
    assert custom.of([one, one, two, three]) == {
        "custom/groups/solved": pytest.approx(1 / 3),
        "custom/groups/tokens_of_right": 5.0,
    }
    assert custom.of([two], "val-custom") == {"val-custom/groups/solved": 0.0} and not messages


async def test_metrics_are_written_to_the_run_folder_loggers_and_terminal(sink, write, tmp_path, monkeypatch):  # noqa: F811
    write("def share(samples): return {'right': sum(s.reward or 0 for s in samples) / len(samples)}\n"
          "def count(samples): return len(samples)\n")  # fmt: skip
    (tmp_path / "run").mkdir()
    log, messages = log_in(tmp_path / "run", timeline_freq=0, metrics=["mine.py:share", "mine.py:count"]), []
    monkeypatch.setattr(log.loggers.terminal, "say", messages.append)
    held_out = samples(Reward(1.0), Reward(1.0))
    log.metrics.log_validation(0, SimpleNamespace(groups=[Group(held_out[0].prompt, held_out)]))
    await run_step(log, 1, [Reward(1.0), Reward(0.0), RewardFailure("judge", "timed out"), Reward(0.0)])
    log.close()
    before, first = read_metrics(tmp_path / "run/metrics.jsonl")
    assert (before["val-custom/share/right"], before["val-custom/count"]) == (1.0, 2.0)
    assert (first["custom/share/right"], first["custom/count"]) == (0.25, 4.0)
    logged = dict(sink.of("log"))
    assert logged[0]["val-custom/count"] == 2.0 and logged[1]["custom/count"] == 4.0
    assert "val-custom/share/right 1.000" in messages[0] and "share/right 0.25  count 4" in "\n".join(messages)
    assert "share/right 0.25  count 4" in step_line(1, 3, first)


def test_a_function_receives_copies_of_all_sample_fields(write):
    write("import pathlib\ndef seen(samples):\n"
          "    s = samples[0]\n"
          "    pathlib.Path('seen').write_text(repr((s.id, s.step, s.prompt_index, s.prompt_text, s.response,"
          " s.data_source, s.ground_truth, s.response_ids, s.finish_reason, s.reward, s.parts)))\n"
          "    s.parts.clear(), s.response_ids.clear(), s.columns.clear()\n    return {}\n")  # fmt: skip
    [sample] = samples(Reward(0.5, {"exact": 1.0}))
    sample.prompt.columns["extra_info"] = {"level": 3}
    custom, _ = metrics("seen")
    assert custom.of([sample]) == {}
    wanted = ("4/0/0", 4, 0, "how many?", "seven", "sums", "7", [0, 1, 2, 3, 4], "stop", 0.5, {"exact": 1.0})
    assert Path("seen").read_text() == repr(wanted)
    assert sample.reward.parts == {"exact": 1.0} and sample.prompt.columns == {"extra_info": {"level": 3}}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1 / 0", r"raised ZeroDivisionError: division by zero(.|\n)*mine.py., line 2, in f"),
        ("raise SystemExit(3)", "raised SystemExit: 3"),
        ("return {'a': float('nan'), 'b': 2}", "a: returned nan; a metric .* be finite"),
        ("return {'a': None, 'b': 2}", r"a: returned None \(NoneType\); a metric .* be a number"),
        ("pass", r"returned None \(NoneType\); a metric .* be a number"),
        ("return [1, 2]", r"returned \[1, 2\] \(list\); a metric .* be a number"),
        ("import torch\n    return {'a': torch.ones(2), 'b': torch.tensor(2)}", "a: returned an array of shape"),
    ],
)
def test_errors_are_reported_once_and_omit_only_that_metric(write, body, message):
    write(f"def f(samples):\n    {body}\ndef g(samples):\n    return 7\n")
    custom, messages = metrics("f", "g")
    for _ in range(3):
        found = custom.of(samples(Reward(1.0)))
        assert found == {"custom/g": 7.0} | ({"custom/f/b": 2.0} if "'b'" in body else {})
    (line,) = messages
    assert line.startswith("trainer.metrics=mine.py:f: ") and re.search(message, line), line
    assert "custom_metrics.py" not in line and "The run continues without this metric" in line


def test_a_metric_that_hangs_is_disabled(write, monkeypatch):
    monkeypatch.setattr(custom_metrics, "TIME_LIMIT_S", 0.2)
    write("import threading\nasked = []\ndef f(samples):\n    asked.append(1)\n    threading.Event().wait(60)\n"
          "def g(samples): return len(asked)\n")  # fmt: skip
    custom, messages = metrics("f", "g")
    assert [custom.of(samples(Reward(1.0))) for _ in range(2)] == [{"custom/g": 1.0}] * 2
    assert messages == ["trainer.metrics=mine.py:f: took longer than 0.2 s and is disabled. The run continues without "
                    "this metric; reported once."]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("other.py:f", "the file .*other.py does not exist; correct the path"),
        ("mine.py:best", "has no function `best`; its functions: f, g, k; name one"),
        ("mine.py:g", r"takes \(samples, step\) instead of one list of samples; correct it to `def g\(samples\)`"),
        ("mine.py:k", "the function is async"),
        ("mine.py", "does not name a function in a file; write path/file.py:name"),
    ],
)
def test_invalid_functions_are_reported_at_startup(write, name, message):
    write("def f(samples): ...\ndef g(samples, step): ...\nasync def k(samples): ...\n")
    (problem,) = problems(name)
    assert problem.startswith(f"trainer.metrics={name}: ") and re.search(message, problem), problem
    assert problems("mine.py:f") == []
    assert re.search("two functions are named f, .*rename one", problems("mine.py:f", "other/mine.py:f")[-1])


def test_a_file_that_fails_is_reported_with_other_problems_and_no_run_folder_is_created(write, tmp_path):
    write("def f(samples): ...\n1 / 0\n")
    config, (train, _) = Config(), write_parquet(tmp_path, 8, 2, seed=1)
    config.model.path, config.data.train_files, config.data.train_batch_size = str(tmp_path / "model"), [str(train)], 4
    config.trainer.metrics, config.trainer.logger = ["mine.py:f"], []
    config.reward.functions = ["rlfuse.rewards.verifiers.numeric:score"]
    build_tokenizer().save_pretrained(tmp_path / "model")
    Qwen2Config(hidden_size=8, num_hidden_layers=1).save_pretrained(tmp_path / "model")
    job = Job(config, tmp_path / "run", None, {"step": 0}, 0.0)
    problem = r"metrics=mine\.py:f: its file can't be executed: ZeroDivisionError"
    with pytest.raises(ConfigError, match=problem):
        _attempt(job, None)
    assert not job.folder.exists()
    config.fusion.policy = "half"
    with pytest.raises(ConfigError, match=rf"(?s)1. fusion.policy=half: .*2. trainer.{problem}"):
        _attempt(job, None)


def test_tensors_and_booleans_are_valid_metrics(write):
    write("import torch\ndef f(samples): return {'a': torch.tensor(0.5), 'b': True, 3: 1}\n")
    found = metrics("f")[0].of(samples(Reward(1.0)))
    assert found == {"custom/f/a": 0.5, "custom/f/b": 1.0, "custom/f/3": 1.0}
