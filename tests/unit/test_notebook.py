"""`rlfuse.notebook`: tables of runs, rewards on tables, plots, jobs."""

import copy
import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import matplotlib
import pandas as pd
import psutil
import pytest

matplotlib.use("Agg")

from scored_rows import score_table

from rlfuse import notebook as nb
from rlfuse.api.jobs import Job
from rlfuse.api.results import Run
from rlfuse.errors import ConfigError
from rlfuse.run_folder.reader import RunError
from rlfuse.samples import Reward

RUN = Path(__file__).parents[2] / "notebooks" / "data" / "run"
"""Recorded run folder of the quickstart."""


@pytest.fixture(scope="module")
def table():
    return nb.samples(RUN)


def test_samples_have_their_group_and_reward_parts(table):
    assert len(table) == 12 * 32 and set(table.groupby("group").size()) == {4}
    assert (table["reward"] == table["rewards/compute_score"]).all()
    assert table.loc[0, "columns"]["extra_info"]["dividend"] == 5


def test_saved_samples_get_the_same_score_as_in_the_run(table):
    again = nb.score(table, "rlfuse.tasks.remainder:compute_score")
    assert again["reward"].equals(table["reward"])
    seen = []

    def inspect_rows(prompts, completions, extra_info, **columns):
        seen.append((prompts[4], completions[4], extra_info[4], columns["reward_model"][4]["ground_truth"]))
        return [1.0] * len(prompts)

    assert (nb.score(table, inspect_rows)["reward"] == 1.0).all()
    prompt, completion, extra, truth = seen[0]
    assert prompt == [{"role": "user", "content": "67 mod 7 ="}] and truth == "4"
    assert completion[0]["content"].startswith(" 67 - 7 = 59") and extra["divisor"] == 7


def test_metrics_reproduce_the_values_of_the_run(table, tmp_path):
    def right(samples):
        best = {}
        for each in samples:
            assert each.parts["compute_score"] == each.reward and each.finish_reason in ("stop", "length")
            best[each.prompt_index] = max(best.get(each.prompt_index, 0), each.reward)
        return {"mean": sum(each.reward for each in samples) / len(samples), "solved": sum(best.values()) / len(best)}

    measured = nb.measure(table, right)
    assert measured["mean"].tolist() == table.groupby("step")["reward"].mean().tolist()
    solved = table.groupby(["step", "group"])["reward"].max().groupby("step").mean()
    assert measured["solved"].tolist() == solved.tolist() and measured.index.tolist() == list(range(1, 13))
    (tmp_path / "mine.py").write_text("def count(samples): return len([s for s in samples if s.reward is None])\n")
    failed = table.assign(reward=table["reward"].where(table["step"] != 2))
    assert nb.measure(failed, f"{tmp_path}/mine.py:count")["count"].tolist()[:3] == [0, 32, 0]
    with pytest.raises(ConfigError, match=r"trainer\.metrics=.*has no function `other`"):
        nb.measure(table, f"{tmp_path}/mine.py:other")
    with pytest.raises(ValueError, match="a metric must be finite"):
        nb.measure(table, lambda samples: float("nan"))


def test_metrics_receive_token_counts_without_tokens(table, tmp_path):
    text = (Path(__file__).parents[2] / "rlfuse/observe/README.md").read_text()
    (tmp_path / "mine.py").write_text(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1])
    measured = nb.measure(table, f"{tmp_path}/mine.py:groups")
    right = table[table["reward"] == 1].groupby("step")["response_tokens"].mean()
    assert measured["tokens_of_right"].tolist() == pytest.approx(right.tolist()) and (right > 0).all()
    for read in (list, sum, lambda ids: ids[0], lambda ids: ids[-2:], lambda ids: 3 in ids):
        with pytest.raises(ValueError, match="response_ids: the tokens of this response were not saved"):
            nb.measure(table, lambda samples, read=read: read(samples[0].response_ids))


def test_any_reward_scores_any_table(tmp_path):
    (tmp_path / "mine.py").write_text("def long(solution_str, weight=1):\n    return weight * len(solution_str)\n")
    rows = pd.DataFrame({"prompt": "q", "response": ["a", "bbb"], "ground_truth": [None, "x"]}, index=["one", "two"])

    class Judge:
        def score(self, samples):
            return [Reward(2.0, {"seen": 1.0}) if item.ground_truth is None else None for item in samples]

    entries = [{"path": f"{tmp_path}/mine.py:long", "weight": 0.5, "kwargs": {"weight": 2}}, Judge()]
    scored = nb.score(rows, entries)
    assert list(scored.index) == ["one", "two"] and list(scored["reward"]) == [3.0, 3.0]
    assert scored.loc["one", "rewards/Judge/seen"] == 1.0 and scored.loc["two", "rewards/long"] == 6.0


def test_a_reward_cannot_modify_the_table_or_other_calls(table):
    def modifies(prompts, completions, extra_info, ground_truth, reward_model, **columns):
        taken = [info.pop("dividend") for info in extra_info]
        for given in (prompts, completions, ground_truth, reward_model, *prompts, *reward_model, *columns.values()):
            given.clear() if hasattr(given, "clear") else None
        return [float(number) for number in taken]

    def pops(solution_str, extra_info):
        return extra_info.pop("divisor")

    before = copy.deepcopy(table[:8].to_dict("records"))
    first, again = (nb.score(table[:8], [modifies, modifies, pops, pops]) for _ in range(2))
    assert first["failure"].isna().all() and first.equals(again)
    assert table[:8].to_dict("records") == before
    info = {"divisor": 3.0}
    rows = [{"prompt": "q", "response": "a", "extra_info": info} for _ in range(2)]  # shared by the group
    assert [row["reward"] for row in score_table(pops, rows)] == [3.0, 3.0] and info == {"divisor": 3.0}


def test_failures_are_reported_in_the_table(table):
    def picky(solution_str):
        return 1 / (len(solution_str) % 7)

    scored = nb.score(table[:50], picky)
    failed = scored[scored["failure"].notna()]
    assert 0 < len(failed) < 50 and failed["reward"].isna().all()
    assert failed["failure"].iloc[0] == "picky: ZeroDivisionError: division by zero"
    assert "in picky" in failed["traceback"].iloc[0]
    assert nb.compare(table[:50], scored).unscored == len(failed)


def test_unsaved_tokens_are_not_an_empty_list(table):
    def by_length(completion_ids=None, **kwargs):
        return [float(len(tokens)) for tokens in completion_ids]

    def by_tokens(completion_ids=None, **kwargs):
        return [float(sum(tokens)) for tokens in completion_ids]

    class Short:
        def score(self, samples):
            return [-float(len(sample.response_ids)) for sample in samples]

    first = table[:2]
    assert nb.score(first, by_length)["reward"].tolist() == first["response_tokens"].tolist()
    assert nb.score(first, Short())["reward"].tolist() == (-first["response_tokens"]).tolist()
    assert (
        nb.score(first, by_tokens)["failure"]
        .str.contains("response_ids: the tokens of this response were not saved")
        .all()
    )
    assert nb.score(first.assign(response_ids=[[1, 2], [3]]), by_tokens)["reward"].tolist() == [3.0, 3.0]
    plain = pd.DataFrame({"prompt": "q", "response": "a"}, index=[0, 1])
    for rows in (plain, plain.assign(response_ids=[[], None])):
        for reward in (by_length, by_tokens, Short()):
            scored = nb.score(rows, reward)
            assert scored["failure"].str.contains("response_ids: the tokens of this response were not saved").all()
            assert scored["reward"].isna().all()
    assert nb.score(plain.assign(response="", response_ids=[[], []]), by_length)["reward"].tolist() == [0.0, 0.0]


def test_surprise_is_the_difference_from_the_group():
    rewards = {"group": ["a", "a", "a", "b", "c", "c"], "reward": [1.0, 0.0, 0.0, 1.0, 0.5, None]}
    found = nb.surprise(pd.DataFrame(rewards))
    assert list(found[:3]) == [1.0, 0.5, 0.5] and found[3:].isna().all()


def test_metrics_and_time_by_step():
    metrics, spent = nb.metrics(RUN), nb.time_spent(RUN)
    assert list(metrics.index) == list(range(13)) and metrics.loc[0, "val-core/remainder/acc/mean@1"] > 0
    assert list(spent.index) == list(range(1, 13)) and spent.columns.str.startswith(("busy/", "idle/")).all()
    assert spent.loc[3].sum() == pytest.approx(metrics.loc[3, "timing_s/step"], rel=0.1)


def test_invalid_run_folders_are_reported(tmp_path):
    with pytest.raises(RunError, match=r"is not a run folder \(No such file or directory: config\.yaml\)"):
        nb.samples(tmp_path)
    (tmp_path / "config.yaml").write_text((RUN / "config.yaml").read_text())
    with pytest.raises(RunError, match="log_samples above 0"):
        nb.samples(tmp_path)
    with pytest.raises(RunError, match=r"metrics\.jsonl is empty; try again"):
        nb.metrics(tmp_path)


@pytest.mark.slow
def test_plots_show_their_data(table):
    short = nb.score(table, lambda solution_str: 1.0 / len(solution_str))
    histogram = nb.plot_rewards(table, short[short.index > 3], labels=("saved", "short"))
    bars = [sum(patch.get_height() for patch in container) for container in histogram.containers]
    assert bars == [384, 380] and [text.get_text() for text in histogram.get_legend().get_texts()] == ["saved", "short"]
    dots = nb.plot_comparison(nb.compare(table, short)).collections
    assert sum(len(each.get_offsets()) for each in dots) == 384
    curve = nb.plot_metrics(RUN, "critic/score/mean").lines[0]
    assert len(curve.get_xdata()) == 12
    time_bars = nb.plot_time(RUN, first=2, most=3)
    spent = nb.time_spent(RUN).loc[2:].sum().sum()
    assert sum(patch.get_height() for patch in time_bars.patches) == pytest.approx(spent)
    assert len(nb.plot_step(RUN, 12).get_yticks()) == 2


# Jobs ----------------------------------------------------------------------------------------------------------------


def job(script, folder=Path("somewhere")):
    return Job(folder, [sys.executable, "-u", "-c", script], Run)


def test_follow_prints_output_until_the_job_ends(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    lines = []
    running = job("import os\nprint('one', os.environ.get('FORCE_COLOR'))\nprint(os.getcwd() + '/runs/x')")
    assert running.follow(30, lines.append) == Run("somewhere")
    assert lines == ["one None", "runs/x"] and not running.running
    assert running.follow(30, lines.append) == Run("somewhere") and len(lines) == 2


def test_failed_job_reports_the_end_of_its_output():
    with pytest.raises(nb.JobError, match=r"ended with status 3:\nline 40\n(.*\n)*line 99$"):
        job("for i in range(100): print('line', i)\nraise SystemExit(3)").follow(30, lambda line: None)


@pytest.mark.slow
@pytest.mark.parametrize("ignores", [False, True])
def test_job_is_stopped_after_the_timeout(monkeypatch, ignores):
    monkeypatch.setattr(Job.stop, "__defaults__", (0.3, print))
    monkeypatch.setattr("rlfuse.api.jobs.STOPPING_S", 0.5 if ignores else 30.0)
    handler = "signal.SIG_IGN" if ignores else "signal.default_int_handler"
    running = job(f"import signal, time\nsignal.signal(signal.SIGINT, {handler})\nprint('up')\ntime.sleep(600)")
    process = psutil.Process(running._process.pid)
    assert running._lines.get(timeout=60) == "up"  # signal handlers are installed
    with pytest.raises(nb.JobError, match=r"longer than timeout_s=0\.2 and was stopped(.*\n)*up"):
        running.follow(0.2)
    assert not process.is_running()


LISTENS = """
import signal, time
from rlfuse.stopping import Stopping
import asyncio
async def steps():
    listening.step = 3
    print('up')
    while not listening.is_requested: await asyncio.sleep(0.01)
    await asyncio.sleep({left})
    print('saved')
listening = Stopping(60.0, print)
asyncio.run(listening.listen_during(steps()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("left, end", [(0.1, "saved"), (600, "Ctrl-C again")])
def test_an_interrupt_stops_the_job_after_the_step_and_a_second_one_at_once(capsys, left, end):
    running = job(LISTENS.format(left=left))

    def interrupt(line):
        if line == "up":
            if left > 1:
                threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of shells ignore SIGINT
    try:
        with pytest.raises(KeyboardInterrupt):
            running.follow(60, interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not running.running and "interrupt again" in (output := capsys.readouterr().out) and end in output


@pytest.mark.slow
def test_job_is_checked_before_it_starts_and_its_name_is_fixed(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="did you mean"):
        nb.start("rollout.nn=2")
    started = []
    monkeypatch.setattr("rlfuse.api.commands.Job", lambda folder, command, _: started.append((folder, command)))
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2", "max_position_embeddings": 4096}')
    nb.start(
        "data.train_files=[train.jsonl]",
        "model.path=model",
        "cluster.device=cpu",
        "reward.functions=[rlfuse.tasks.remainder:compute_score]",
        "trainer.experiment_name=at-${now:%H%M%S}",
    )
    [(folder, command)] = started
    assert command[-1] == f"trainer.experiment_name='{folder.name}'" and folder.name.startswith("at-")
    assert folder.parent == tmp_path / "runs" / "rlfuse"
