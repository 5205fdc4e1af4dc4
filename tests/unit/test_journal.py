"""Output of the journal at the end of a step: files of the run folder, logger sinks, and the terminal."""

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from rlfuse.config.schema import Config
from rlfuse.errors import ConfigError, NotWritten, RewardError
from rlfuse.events import Span, read_events
from rlfuse.files import RowFile
from rlfuse.observe.alerts import Alert
from rlfuse.observe.loggers import Loggers
from rlfuse.observe.run_log import RunLog
from rlfuse.observe.tracking import read_metrics, sample_row
from rlfuse.run.checkpointing import Checkpointing
from rlfuse.run_folder import checkpoints
from rlfuse.samples import Group, Prompt, Response, Reward, RewardFailure, Sample

FAILED = RewardFailure("judge", "timed out")


class RecordingSink:
    """A sink that records its calls."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *arguments, **named: self.calls.append((name, *arguments, *named.values()))

    def of(self, name):
        return [call[1:] for call in self.calls if call[0] == name]


def finished(step, number, reward):
    prompt = Prompt(number, np.arange(3, dtype=np.int32), "how many?", (), "sums", "7")
    response = Response(np.arange(5, dtype=np.int32), np.zeros(5, np.float32), "stop", step - 1, "seven")
    return Sample(prompt, step, 0, 0, response, reward)


def board_of(samples):
    kept = [Group(s.prompt, [s]) for s in samples if isinstance(s.reward, Reward)]
    return SimpleNamespace(
        kinds=("reward",),
        groups=[Group(s.prompt, [s]) for s in samples],
        partials={},
        unneeded_groups=lambda: ([], {}),
        samples={s.id: s for s in samples},
        groups_to_train=lambda: kept,
        needed_samples=lambda: samples,
        failures=lambda: [(s, s.reward) for s in samples if isinstance(s.reward, RewardFailure)],
    )


@pytest.fixture
def sink(monkeypatch):
    sink = RecordingSink()
    monkeypatch.setattr("rlfuse.observe.loggers.sinks", lambda *_: [sink])
    return sink


def log_in(folder, start=0, timeline_freq=2, metrics=()):
    config = Config()
    config.trainer.metrics = list(metrics)
    config.trainer.logger, config.trainer.log_samples, config.trainer.timeline_freq = [], 2, timeline_freq
    config.trainer.log_samples_freq = 2
    config.reward.max_failure_rate = 0.5
    return RunLog(config, {}, folder, total_steps=3, start=start)


async def run_step(log, step, rewards):
    journal = log.journal
    with journal.recorder.span("step", step=step) as span:
        journal.recorder.add(Span("gen", "driver", span.start, span.start + 1e-3, step, attributes={"slot": 0}))
        decode = {"batch": 3, "context": 9}
        journal.recorder.add(Span("decode", "rollout/0", span.start, span.start + 1e-3, step, attributes=decode))
    samples = [finished(step, number, reward) for number, reward in enumerate(rewards)]
    log.metrics.log_step(step, board_of(samples), await journal.collect(step))


@pytest.mark.slow
async def test_steps_are_written_to_the_folder_and_to_every_sink(sink, tmp_path, capsys):
    log = log_in(tmp_path)
    for step in (1, 2, 3):
        log.metrics.add({"actor/ppo_kl": 0.5})
        await run_step(log, step, [Reward(1.0), Reward(0.0), RewardFailure("judge", "timed out")])
    log.close(ValueError("the end"))
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [values for _, values in sink.of("log")] == [{k: v for k, v in row.items() if k != "step"} for row in rows]
    assert rows[0]["reward/failure_rate"] == pytest.approx(1 / 3) and rows[0]["busy/generate"] > 0
    kept = read_metrics(tmp_path / "samples.jsonl")
    assert [row["id"] for row in kept] == [f"{step}/{number}/0" for step in (1, 2, 3) for number in (0, 1)]
    shown = [row | {"step": step} for step, table in sink.of("samples") for row in table]
    assert shown == [row for row in kept if row["step"] in (2, 3)], "logged every second step and at the last"
    assert [(step, name) for step, name, _ in sink.of("picture")] == [(2, "timeline"), (3, "timeline")]
    assert all(path.read_bytes().startswith(b"\x89PNG") for _, _, path in sink.of("picture"))
    assert [(step, alert.title) for step, alert in sink.of("alert")] == [
        (1, "KL: actor/ppo_kl"),
        (1, "reward failures"),
    ], "each alert is reported once, although its cause continues"
    assert sink.of("failure") == [("run", "ValueError: the end")] and sink.calls[-1] == ("close", 1)


async def test_resumed_run_drops_later_rows_and_repeats_no_alert(sink, tmp_path):
    log = log_in(tmp_path, timeline_freq=0)
    for step in (1, 2):
        log.metrics.add({"actor/ppo_kl": 0.5})
        await run_step(log, step, [Reward(1.0)])
    log.close()
    log = log_in(tmp_path, start=1, timeline_freq=0)
    assert [row["step"] for name in ("metrics", "samples") for row in read_metrics(tmp_path / f"{name}.jsonl")] == [
        1,
        1,
    ]
    log.metrics.add({"actor/ppo_kl": 0.5})
    await run_step(log, 2, [Reward(1.0)])
    assert [step for step, _ in sink.of("alert")] == [1]
    log.close()


@pytest.mark.parametrize(("data", "aborted"), [("one_step_off", 0), ("partial_rollout", 0), ("over_sampling", 0.5)])
async def test_carried_over_samples_do_not_count_as_aborted(data, aborted, sink, tmp_path):
    log = log_in(tmp_path, timeline_freq=0)
    log.metrics.config.fusion.data = data
    samples = [finished(1, number, reward) for number, reward in enumerate([Reward(1.0), FAILED, None, None])]
    board = board_of(samples)
    board.unneeded_groups = lambda: (board.groups[2:], {})
    board.needed_samples = lambda: samples[:2]
    for sample in samples[2:]:
        sample.response = None
    with log.journal.recorder.span("step", step=1):
        pass
    log.metrics.log_step(1, board, await log.journal.collect(1))
    log.close()
    [row] = read_metrics(tmp_path / "metrics.jsonl")
    assert row["response/aborted_ratio"] == aborted and row["reward/failure_rate"] == 0.5


async def test_failure_rate_includes_baselines(sink, tmp_path):
    log = log_in(tmp_path, timeline_freq=0)
    samples = [finished(1, number, FAILED if number else Reward(1.0)) for number in range(2)]
    board = board_of(samples)
    baselines = [replace(sample, rollout_index=1, is_baseline=True) for sample in samples]
    board.samples |= {sample.id: sample for sample in baselines}
    board.failures = lambda: [(s, s.reward) for s in board.samples.values() if isinstance(s.reward, RewardFailure)]
    with log.journal.recorder.span("step", step=1):
        pass
    log.metrics.log_step(1, board, await log.journal.collect(1))
    log.close()
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["reward/failure_rate"] == 0.5


async def test_statistics_include_groups_that_dynamic_sampling_filtered_out(sink, tmp_path):
    log = log_in(tmp_path, timeline_freq=0)
    log.metrics.config.algorithm.filter_groups.max_num_gen_batches = 2
    samples = [finished(1, number, Reward(float(number != 1))) for number in range(8)]
    board = board_of(samples)
    board.batches, board.groups_to_train = 1, lambda: board.groups[:2]
    for flat in (False, True):
        with log.journal.recorder.span("step", step=1 + flat):
            pass
        board.groups_to_train = list if flat else board.groups_to_train
        log.metrics.log_step(1 + flat, board, await log.journal.collect(1 + flat))
    log.close()
    for row in read_metrics(tmp_path / "metrics.jsonl"):
        assert row["critic/score/mean"] == 7 / 8 and row["response_length/mean"] == 5
        assert "reward/frac_reward_zero_std" in row


async def test_names_of_held_out_metrics_and_reward_parts_persist_after_a_resume(sink, tmp_path):
    gated = Reward(0.0, {"gate": 0.0}, None, {"fn": 0.0}, "gate")
    scored = Reward(1.0, {"gate": 1.0, "fn": 1.0, "fn/acc": 1.0}, None, {"fn": 1.0})

    def board(step, reward):
        sample = finished(step + 1, 0, reward)
        return SimpleNamespace(groups=[Group(sample.prompt, [sample])])

    log = log_in(tmp_path, timeline_freq=0)
    log.metrics.log_validation(0, board(0, gated))
    log.metrics.log_validation(1, board(1, scored))
    await run_step(log, 1, [scored])
    log.close()
    log = log_in(tmp_path, start=1, timeline_freq=0)
    log.metrics.log_validation(2, board(2, gated))
    await run_step(log, 2, [gated])
    log.close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["val-core/sums/acc/mean@1"] for row in rows] == [0.0, 1.0, 0.0]
    assert [row["rewards/fn/acc/coverage"] for row in rows[1:]] == [1.0, 0.0]
    before, after = ({name for name in row if name.startswith(("val-", "rewards/"))} for row in rows[1:])
    assert before == after


def test_validation_responses_are_saved_and_logged(sink, tmp_path):
    def board(step):
        rewards = (Reward(step / 4), RewardFailure("judge", "timed out"), Reward(1.0))
        samples = [finished(step + 1, number, reward) for number, reward in enumerate(rewards)]
        return SimpleNamespace(groups=[Group(samples[0].prompt, samples)])

    log = log_in(tmp_path, timeline_freq=0)
    log.metrics.config.trainer.log_val_generations = 2
    for step in (0, 2):
        log.metrics.log_validation(step, board(step))
    log.close()
    rows = read_metrics(tmp_path / "validation.jsonl")
    assert [(row["step"], row["reward"], row["note"]) for row in rows] == [
        (0, 0.0, None),
        (0, None, "judge: timed out"),
        (2, 0.5, None),
        (2, None, "judge: timed out"),
    ]
    shown = [(row | {"step": step}, name) for step, part, name in sink.of("samples") for row in part]
    assert shown == [(row, "val/generations") for row in rows]
    log_in(tmp_path, start=1, timeline_freq=0).close()
    assert read_metrics(tmp_path / "validation.jsonl") == rows[:2]
    log_in(tmp_path, timeline_freq=0).close()
    assert read_metrics(tmp_path / "validation.jsonl") == []


async def test_all_samples_are_dumped_with_verl_field_names(sink, tmp_path):
    log = log_in(tmp_path, timeline_freq=0)
    trainer = log.metrics.config.trainer
    trainer.rollout_data_dir, trainer.validation_data_dir = str(tmp_path / "a" / "rollouts"), str(tmp_path / "held out")
    rewards = [Reward(0.5, {"acc": 1.0, "score": 3.0}), RewardFailure("judge", "timed out"), Reward(float("nan"))]
    for step in (1, 1, 2):  # a resumed run repeats steps
        await run_step(log, step, rewards)
    log.metrics.log_validation(0, board_of([finished(1, 0, Reward(1.0))]))
    log.close()
    shown = {"input": "how many?", "output": "seven", "gts": "7"}
    for step in (1, 2):
        rows = [json.loads(line) for line in (tmp_path / "a" / "rollouts" / f"{step}.jsonl").read_text().splitlines()]
        assert rows == [
            {"acc": 1.0, "rewards/score": 3.0, **shown, "score": 0.5, "step": step},
            {**shown, "score": None, "step": step},
            {**shown, "score": "NaN", "step": step},
        ]
    (path,) = (tmp_path / "held out").iterdir()
    assert path.name == "0.jsonl" and json.loads(path.read_text()) == {**shown, "score": 1.0, "step": 0}


class Killed(BaseException):
    """End of the process, which no handler catches."""


class Kill:
    """Kill at the `at`-th disk operation: in the middle of rows, before a rename, or in the middle of a removal."""

    def __init__(self, monkeypatch, at):
        self.effects, self.at = 0, at
        append, rename, rmtree = RowFile.append, checkpoints.Path.rename, checkpoints.shutil.rmtree

        def cut_row(file):
            os.truncate(file.path, file.path.stat().st_size - 5)

        def remove_some(folder, **_):
            (folder / "weights").unlink(missing_ok=True)

        def die(*_, **__):
            raise Killed

        monkeypatch.setattr(
            RowFile, "append", self.killing(append, lambda file, rows: (append(file, rows), cut_row(file)))
        )
        monkeypatch.setattr(checkpoints.Path, "rename", self.killing(rename, die))
        monkeypatch.setattr(checkpoints.shutil, "rmtree", self.killing(rmtree, remove_some))

    def killing(self, effect, half):
        def do(*arguments, **named):
            self.effects += 1
            if self.effects == self.at:
                half(*arguments, **named)
                raise Killed
            effect(*arguments, **named)

        return do


class Writer:
    """A trainer whose files are written when `save` returns."""

    saves_in_background = False

    async def is_saving(self):
        return False

    async def saved(self):
        pass


async def resume_run(folder):
    """Resume a run of two steps that saves each step and keeps one checkpoint; return the step that it resumed from."""
    checkpoint = checkpoints.find(folder, "auto")
    start = checkpoints.read_state(checkpoint)["step"] if checkpoint else 0
    log = log_in(folder, start, timeline_freq=0)

    async def save(partial, weights):
        (partial / "weights").write_text("w")

    config = Config()
    config.trainer.max_ckpt_to_keep = 1
    checkpointing = Checkpointing(
        log, config, start=start, save=save, writer=Writer(), state=lambda _: {}, first_bytes=1
    )
    await checkpointing.write_trial()
    for step in range(start + 1, 3):
        checkpointing.remember(step)
        await checkpointing.write(step)
        await run_step(log, step, [Reward(1.0), Reward(0.0)])
        checkpointing.publish()
    log.close()
    return start


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*skipping the last row")
async def test_run_killed_at_any_moment_resumes_with_every_row_once(sink, tmp_path, monkeypatch):
    started, killed, at = set(), True, 0
    while killed:
        at += 1
        (folder := tmp_path / str(at)).mkdir()
        with monkeypatch.context() as patch:
            kill = Kill(patch, at)
            try:
                await resume_run(folder)
                killed = False
            except Killed:
                assert all((path / "weights").exists() for path in checkpoints.complete(folder)), at
        started.add(await resume_run(folder))
        assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [1, 2], at
        ids = [f"{step}/{number}/0" for step in (1, 2) for number in (0, 1)]
        assert [row["id"] for row in read_metrics(folder / "samples.jsonl")] == ids, at
        assert {span.step for span in read_events(folder / "events.jsonl")} == {1, 2}
    assert kill.effects >= 10 and started == {0, 1, 2}


async def test_rows_are_synced_before_a_checkpoint_is_published(sink, tmp_path, monkeypatch):
    """Check at the rename that every row of the step was synced, as only synced data survives a power loss."""
    synced, fsync, rename = {}, os.fsync, checkpoints.Path.rename

    def record_size(descriptor):
        fsync(descriptor)
        synced[os.readlink(f"/proc/self/fd/{descriptor}")] = os.fstat(descriptor).st_size

    def check(path, target):
        for name in ("metrics", "samples", "events"):
            assert synced[f"{tmp_path}/{name}.jsonl"] == (tmp_path / f"{name}.jsonl").stat().st_size > 0
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record_size)
    monkeypatch.setattr(checkpoints.Path, "rename", check)
    assert await resume_run(tmp_path) == 0 and checkpoints.complete(tmp_path)


async def test_failures_are_reported_once_with_their_step(sink, tmp_path):
    log = log_in(tmp_path)
    board = board_of([finished(4, 0, Reward(1.0)), finished(4, 1, RewardFailure("judge", "timed out"))])
    board.purpose = "training"
    log.failures.check(4, board)
    log.failures.check(4, board)
    log.close()
    [(step, rows)] = sink.of("reward_failures")
    assert step == 4 and [row["message"] for row in rows] == ["timed out"]
    assert len(read_metrics(tmp_path / "reward_failures.jsonl")) == 1


async def test_tables_of_failures_are_logged_at_an_interval(sink, tmp_path):
    log = log_in(tmp_path)
    for step in range(1, 6):
        board = board_of([finished(step, 0, Reward(1.0)), finished(step, 1, RewardFailure("judge", "timed out"))])
        board.purpose = "training"
        log.failures.check(step, board)
    log.close()
    assert [step for step, _ in sink.of("reward_failures")] == [1, 3, 5]
    assert len(read_metrics(tmp_path / "reward_failures.jsonl")) == 5


async def test_exception_of_a_reward_is_reported_once_whether_the_run_continues_or_stops(sink, tmp_path, monkeypatch):
    messages = []
    monkeypatch.setattr(Loggers, "say", lambda _, text: messages.append(text))
    failed = RewardFailure("f", "ValueError: boom", "Traceback (most recent call last):\n  x.py\nValueError: boom")
    log = log_in(tmp_path)  # up to half of the samples may fail
    some, all_of_them = (
        board_of([finished(1, 0, Reward(1.0)), finished(1, 1, failed)]),
        board_of([finished(2, 0, failed)]),
    )
    some.purpose = all_of_them.purpose = "training"
    log.failures.check(1, some)
    assert "".join(messages).count("ValueError: boom") == 1
    messages.clear()
    with pytest.raises(RewardError) as error:
        log.failures.check(2, all_of_them)
    log.close()
    assert messages == [] and str(error.value).count("ValueError: boom") == 1 and "max_failure_rate" in str(error.value)


async def test_every_sink_is_closed_on_a_full_disk(sink, tmp_path, monkeypatch):
    log = log_in(tmp_path)
    log.journal.recorder.add(Span("gen", "driver", 0, 1))
    full = NotWritten("events.jsonl: 9 bytes could not be added")
    monkeypatch.setattr(RowFile, "append", lambda *_: (_ for _ in ()).throw(full))
    log.close(full)
    assert sink.of("failure") == [("run", f"NotWritten: {full}")] and sink.calls[-1] == ("close", 1)
    log = log_in(tmp_path)
    log.journal.recorder.add(Span("gen", "driver", 0, 1))
    with pytest.raises(NotWritten):
        log.close()
    assert sink.calls[-1] == ("close", 0)


async def test_failing_sink_is_disabled_and_the_run_continues(sink, tmp_path, monkeypatch):
    messages = []
    monkeypatch.setattr(Loggers, "say", lambda _, text: messages.append(text))
    log = log_in(tmp_path, timeline_freq=0)
    lost = SimpleNamespace(log=lambda *_: (_ for _ in ()).throw(ConnectionResetError("Connection lost")))
    log.loggers._sinks.insert(0, lost)
    for step in (1, 2):
        await run_step(log, step, [Reward(1.0)])
    log.close()
    assert [step for step, _ in sink.of("log")] == [1, 2] and len(read_metrics(tmp_path / "metrics.jsonl")) == 2
    (left_out,) = (text for text in messages if "Connection lost" in text)
    assert left_out.startswith("SimpleNamespace disabled after ConnectionResetError")


def test_tensorboard_logs_scalars_samples_images_and_alerts(tmp_path):
    pytest.importorskip("tensorboard")
    from matplotlib.figure import Figure
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from rlfuse.observe.tensorboard_sink import TensorBoard

    Figure((1, 1)).savefig(tmp_path / "x.png")
    sink = TensorBoard(tmp_path)
    for step in (1, 2):
        sink.log(step, {"critic/score/mean": step / 2, "actor/ppo_kl": float("nan")})
        sink.samples(step, [sample_row(finished(step, 0, Reward(0.25)))])
        sink.samples(step, [sample_row(finished(step, 0, Reward(0.75)))], "val/generations")
    sink.picture(2, "timeline", tmp_path / "x.png")
    sink.alert(2, Alert("zero spread", "all equal"))
    sink.failure("reward", "Traceback\n  line")
    sink.close(0)
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in found.Scalars("critic/score/mean")] == [(1, 0.5), (2, 1.0)]
    assert found.Tags()["scalars"] == ["critic/score/mean"] and found.Tags()["images"] == ["timeline"]
    texts = {tag: found.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in found.Tags()["tensors"]}
    assert texts["samples/0/text_summary"].endswith("    7"), "the ground truth"
    assert "2/0/0, reward 0.25" in texts["samples/0/text_summary"] and "    seven" in texts["samples/0/text_summary"]
    assert "2/0/0, reward 0.75" in texts["val/generations/0/text_summary"]
    assert "zero spread" in texts["alerts/text_summary"] and "      line" in texts["errors/reward/text_summary"]


@pytest.mark.slow
def test_mlflow_logs_settings_scalars_samples_images_and_alerts(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    from matplotlib.figure import Figure

    from rlfuse.observe.mlflow_sink import MLflow

    config, run = Config(), tmp_path / "rlfuse" / "first"
    config.trainer.default_local_dir, config.trainer.experiment_name = str(tmp_path), "first"
    run.mkdir(parents=True)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow/mlflow.db")

    def only_run():
        (found,) = client.search_runs([client.get_experiment_by_name("rlfuse").experiment_id])
        return found

    Figure((1, 1)).savefig(run / "step_2.png")
    for start in (0, 2):  # the second resumes
        sink = MLflow(config, {"actor": {"optim": {"lr": 1e-6}}, "data": {"val_files": []}}, run, start)
        for step in (start + 1, start + 2):
            sink.log(step, {"val-core/sums/acc/mean@1": step / 4, "actor/ppo_kl": float("nan"), "val-core/a://b": 1.0})
        scored = Reward(0.25, {"exact": 1.0, "reward": 0.5})
        sink.samples(start + 2, [sample_row(finished(1, 0, scored))], "val/generations")
        sink.picture(start + 2, "timeline", run / "step_2.png")
        sink.alert(start + 2, Alert("zero spread", "all equal"))
        sink.alert(start + 2, Alert("slow worker: rank 1 (slot 1)", "slow"))
        if not start:
            sink.failure("run", "an error")
            assert only_run().data.tags["error"] == "run: an error"
        sink.close(1)
    found = only_run()
    assert (found.info.run_name, found.info.status) == ("first", "FAILED")
    assert found.data.params == {"actor.optim.lr": "1e-06", "data.val_files": "[]"}
    name = "val-core/sums/acc/mean_at_1"
    values = [(each.step, each.value) for each in client.get_metric_history(found.info.run_id, name)]
    assert sorted(values) == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    assert {*found.data.metrics} == {
        name,
        "val-core/a_/_/b",
    } and "alert/slow worker_ rank 1 _slot 1_" in found.data.tags
    assert found.data.tags["alert/zero spread"] == "step 4: all equal" and "error" not in found.data.tags
    artifacts = tmp_path / "mlflow" / "artifacts" / found.info.run_id / "artifacts"
    assert (artifacts / "timeline" / "step_2.png").stat().st_size
    table = json.loads((artifacts / "val" / "generations" / "step_2.json").read_text())
    assert table["columns"] == ["id", "prompt", "response", "ground_truth", "reward", "exact", "rewards/reward"]
    assert table["data"] == [["1/0/0", "how many?", "seven", "7", 0.25, 1.0, 0.5]]


@pytest.mark.slow
def test_unreachable_mlflow_server_gives_one_message(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    from rlfuse.observe.mlflow_sink import MLflow

    with pytest.raises(ConfigError, match=r"mlflow could not start a run .*check MLFLOW_TRACKING_URI"):
        MLflow(Config(), {}, tmp_path, 0)
    assert not list(tmp_path.iterdir())
