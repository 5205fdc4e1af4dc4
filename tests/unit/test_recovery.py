"""Restarts after lost workers: attempts, liveness of engines, classification of errors, counts of faults."""

import os
import threading

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, NodeDiedError, OutOfMemoryError, RayTaskError

from rlfuse.cluster.remote import all_of, explain
from rlfuse.config.schema import Config
from rlfuse.engines.rollout.liveness import Liveness
from rlfuse.errors import ConfigError, EngineError, EngineLost, NodeLeft, NodeLost, RunError, WorkerLost
from rlfuse.events import Span
from rlfuse.observe.journal import count_faults, fault_metrics
from rlfuse.run.job import how_to_resume, no_restart_reason, run_with_restarts, worker_startup
from rlfuse.run_folder import checkpoints, status


@pytest.fixture
def config(tmp_path):
    config = Config()
    config.model.path = "somewhere"
    config.trainer.default_local_dir, config.trainer.experiment_name = str(tmp_path), "run"
    return config


class Attempts:
    """Attempts that end after the given steps with an error, or None for a complete run; every second step is saved."""

    def __init__(self, *ends):
        self.ends, self.jobs = list(ends), []

    def __call__(self, job):
        self.jobs.append(job)
        job.folder.mkdir(parents=True, exist_ok=True)
        steps, end = self.ends.pop(0)
        rows = "".join(f'{{"step": {step}}}\n' for step in range(steps + 1))
        (job.folder / "metrics.jsonl").write_text(rows)
        for step in range(job.state["step"] + 1, steps + 1):
            if step % 2 == 0:
                saved = job.folder / f"global_step_{step}"
                saved.mkdir(exist_ok=True)
                (saved / "run.json").write_text(f'{{"step": {step}}}')
                (saved / checkpoints.MARKER).touch()
        if isinstance(end, Exception):
            raise end
        return job.folder


def test_a_run_restarts_from_its_last_checkpoint_or_start_after_a_lost_worker(config, capsys):
    lost = WorkerLost("trainer/0 died"), WorkerLost("trainer/1 died: http://me:secret@host")
    attempts = Attempts((1, lost[1]), (5, lost[0]), (8, None))
    folder = run_with_restarts(config, attempts)
    assert [job.state["step"] for job in attempts.jobs] == [0, 0, 4]
    assert attempts.jobs[2].checkpoint == folder / "global_step_4"
    assert [job.restart.cause for job in attempts.jobs[1:]] == [str(lost[1]), str(lost[0])]
    output = capsys.readouterr().out
    assert "trainer/1 died: http://***@host\nThe run resumes from its start (restart 1 of at most 3)" in output
    assert "from global_step_4 (restart 2 of at most 3)" in output


def test_a_planned_departure_of_a_node_is_no_fault_and_excludes_the_node(config, capsys):
    config.cluster.max_restarts, config.cluster.drain = 0, [1]
    ends = [(4, NodeLeft("node b leaves", ("b",))), (4, NodeLeft("lost node c", ("c",))), (8, None)]
    attempts = Attempts(*ends)
    folder = run_with_restarts(config, attempts)
    assert [job.state["step"] for job in attempts.jobs] == [0, 4, 4]
    assert [job.excluded_nodes for job in attempts.jobs] == [frozenset(), {"b"}, {"b", "c"}]
    assert [job.restart.kind for job in attempts.jobs[1:]] == ["hand_over", "hand_over"]
    assert not count_faults([job.restart for job in attempts.jobs[1:]])
    assert attempts.jobs[2].drained is attempts.jobs[0].drained and attempts.jobs[0].drained == {1}
    assert attempts.jobs[1].checkpoint == folder / "global_step_4"
    output = capsys.readouterr().out
    assert "node b leaves\nThe run resumes from global_step_4 on other nodes." in output


def test_the_status_stays_running_during_a_restart(config):
    seen, ends = [], [WorkerLost("trainer/1 died"), None]

    async def work():
        if end := ends.pop(0):
            raise end

    def attempt(job):
        seen.append(state := status.read(job.folder))
        assert state is None or status.state_now(job.folder, state) == "running"
        job.run_until_done(work(), job.begin(8))
        assert status.read(job.folder).state == "running", "readers read the summary first"
        return job.folder

    config.trainer.logger = []
    folder = run_with_restarts(config, attempt)
    assert [state and state.state for state in seen] == [None, "running"]
    assert status.read(folder).state == "finished"


def test_a_run_that_fails_at_startup_reports_the_error_and_stops_the_live_view(config, monkeypatch):
    def attempt(job):
        job.begin(8)

    def fail_wandb(*_):
        raise RuntimeError("no key for wandb")

    monkeypatch.setattr("rlfuse.observe.loggers.sinks", fail_wandb)
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="no key"):
        run_with_restarts(config, attempt)
    state = status.read(config.run_folder)
    assert (state.state, state.error) == ("failed", "no key for wandb")
    assert "live view" not in [thread.name for thread in set(threading.enumerate()) - before]


def test_a_run_with_damaged_rows_stops_the_live_view(config):
    config.trainer.logger = []
    config.run_folder.mkdir(parents=True)
    (config.run_folder / "validation.jsonl").write_text("no row\n{}\n")
    before = set(threading.enumerate())
    with pytest.raises(RunError, match=r"validation\.jsonl, line 1"):
        run_with_restarts(config, lambda job: job.begin(8))
    assert "live view" not in [thread.name for thread in set(threading.enumerate()) - before]


def test_a_restart_ignores_checkpoints_of_an_earlier_run(config):
    attempts = Attempts((1, WorkerLost("trainer/1 died")), (2, None))
    for step, age in ((2, 60), (4, 0)):
        old = config.run_folder / f"global_step_{step}"
        old.mkdir(parents=True)
        (old / "run.json").write_text(f'{{"step": {step}}}')
        (old / checkpoints.MARKER).touch()
        os.utime(old / checkpoints.MARKER, (1e9 - age, 1e9 - age))
    config.trainer.resume_mode = str(config.run_folder / "global_step_2")
    run_with_restarts(config, attempts)
    assert [job.state["step"] for job in attempts.jobs] == [2, 2]


@pytest.mark.parametrize("error", [EngineError("it broke"), ConfigError(["wrong"]), KeyboardInterrupt()])
def test_other_errors_and_ctrl_c_end_the_run(config, error):
    def attempt(job):
        raise error

    with pytest.raises(type(error)):
        run_with_restarts(config, attempt)


def test_restarts_end_at_the_limit_or_without_progress(config, capsys):
    assert no_restart_reason([7], limit=0) == "No restart: 0 of at most cluster.max_restarts=0 restarts were made."
    assert no_restart_reason([7], limit=3) is None and no_restart_reason([0], limit=1) is None
    assert no_restart_reason([2, 5, 7], limit=3) is None
    assert (
        no_restart_reason([2, 5, 7, 8], limit=3)
        == "No restart: 3 of at most cluster.max_restarts=3 restarts were made."
    )
    assert "the last of 1 restarts made no progress" in no_restart_reason([7, 7], limit=3)
    assert "the last of 2 restarts made no progress" in no_restart_reason([2, 7, 5], limit=3)
    assert no_restart_reason([None], limit=1) is None and no_restart_reason([7, None], limit=3) is None
    assert no_restart_reason([7, None, 8, None], limit=9) is None
    assert "the last of 2 restarts made no progress" in no_restart_reason([7, None, 7], limit=3)
    assert "before the first step twice in a row" in no_restart_reason([7, None, None], limit=3)
    assert "1 of at most cluster.max_restarts=1" in no_restart_reason([7, None], limit=1)
    dying = Attempts((3, WorkerLost("trainer/1 died")), (3, WorkerLost("trainer/1 died")))
    with pytest.raises(EngineError, match="trainer/1 died\nNo restart: the last of 1 restarts made no progress"):
        run_with_restarts(config, dying)
    assert (
        "rerun the same command to resume from it (trainer.resume_mode=auto)"
        in capsys.readouterr().out.splitlines()[-1]
    )
    last_job = dying.jobs[-1]
    last_job.config.trainer.resume_mode = str(last_job.folder / "global_step_2")
    assert how_to_resume(last_job).endswith(
        f"with trainer.experiment_name={last_job.folder.name} trainer.resume_mode=auto to resume from it"
    )


@pytest.mark.parametrize(
    ("error", "cause", "restarts"),
    [
        (WorkerLost("trainer/1 died"), ActorDiedError(), True),
        (WorkerLost("trainer/1 died"), ActorUnavailableError("no answer", None), True),
        (WorkerLost("trainer/1 died"), OutOfMemoryError("the node is running low on memory"), True),
        (NodeLost("lost node b", ("b",)), None, True),
        (EngineLost("rollout/0 could not start vLLM. Its process was killed"), None, True),
        (WorkerLost("trainer/1 did not load within 5 s"), TimeoutError(), False),
        (WorkerLost("trainer/1 failed to load: it is out of memory"), RayTaskError("f", "", MemoryError()), False),
        (EngineError("trainer/1 failed to load: no such file"), None, False),
    ],
)
def test_only_the_death_of_a_process_at_startup_restarts_a_run(config, capsys, error, cause, restarts):
    # The second start in a row that loses a worker ends the run.
    config.trainer.logger = ["console"]
    attempts = []

    def attempt(job):
        attempts.append(job)
        log = job.begin(8)

        async def start():
            with worker_startup(log):
                raise error from cause

        job.run_until_done(start(), log)

    with pytest.raises(EngineError, match="before the first step twice in a row" if restarts else str(error)):
        run_with_restarts(config, attempt)
    assert len(attempts) == 1 + restarts
    assert ("(restart 1 of at most 3)" in capsys.readouterr().out) == restarts


# Liveness of engines --------------------------------------------------------------------------------------------------


def test_an_engine_is_stalled_only_while_busy_without_steps_or_cpu_time():
    now, cpu = [100.0], [5.0]
    engine = Liveness(lambda: cpu[0], lambda: now[0])

    def after(seconds, computed=0.0, busy=True):
        now[0] += seconds
        cpu[0] += computed
        return engine.check_progress(busy).stalled_s

    assert after(1000, busy=False) == 0  # nothing to do
    assert after(10) == 10 and after(10) == 20
    engine.record_progress("a step of 3 samples")
    assert after(10) == 0 and after(10) == 10  # a step ended in between
    assert after(10, computed=8.0) == 0 and after(10, computed=0.1) == 10  # a long step, then threads that only wait
    assert engine.check_progress(True).last.startswith("a step of 3 samples at ")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ActorDiedError(), WorkerLost),
        (OutOfMemoryError("4 worker(s) were killed due to the node running low on memory. 21 GB used"), WorkerLost),
        (NodeDiedError("the node is gone"), WorkerLost),
        (TimeoutError(), WorkerLost),
        (RayTaskError("f", "", MemoryError()), WorkerLost),
        (RayTaskError("f", "", RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")), WorkerLost),
        (RayTaskError("f", "", RuntimeError("[gloo/pair.cc:538] Connection closed by peer [::1]:9")), WorkerLost),
        (RayTaskError("f", "", EngineLost("rollout/0: vLLM's engine process died")), EngineLost),
        (RayTaskError("f", "", ValueError("the user's")), EngineError),
    ],
)
def test_lost_workers_are_distinguished_from_other_errors(error, kind):
    explained = explain(error, "trainer/0", "update the actor", 5)
    assert type(explained) is kind
    is_out_of_memory = "memory" in repr(getattr(error, "cause", None)).lower()
    assert ("It is out of memory. Lower actor.ppo_max_token_len_per_gpu" in str(explained)) == is_out_of_memory


async def test_a_lost_worker_takes_precedence_over_the_errors_it_causes():
    async def fail(error, cause=None):
        raise error from cause

    calls = [fail(EngineError("trainer/0: a collective failed")), fail(WorkerLost("trainer/1 died"), ActorDiedError())]
    with pytest.raises(WorkerLost, match="trainer/1 died"):
        await all_of(calls)


def test_faults_are_counted_by_kind_of_worker():
    spans = [
        Span("lost", "rollout/1", 0, samples=("1/2/0", "1/2/1"), cause="died"),
        Span("restart", "rollout/1", 0, cause="died"),
        Span("restart", "rollout/1", 0, attributes={"error": "could not start"}),
        Span("restart", "reward/0", 0),
        Span("restart", "reward/model", 0),
        Span("restart", "encoder/0", 0),
        Span("restart", "driver", 0),
        Span("generate", "rollout/0", 0),
        *(Span("optimizer", f"trainer/{rank}", 0, attributes={"model": "critic", "skipped": True}) for rank in (0, 1)),
        Span("optimizer", "trainer/0", 0, attributes={"model": "actor", "skipped": False}),
    ]
    counts = count_faults(spans)
    assert counts == {
        "engines_lost": 1,
        "samples_reissued": 2,
        "engines_replaced": 1,
        "reward_workers_replaced": 2,
        "encoder_ranks_replaced": 1,
        "restarts": 1,
        "critic_steps_skipped": 1,
    }
    assert fault_metrics(counts)["fault/samples_reissued"] == 2.0 and fault_metrics(count_faults([])) == {}
