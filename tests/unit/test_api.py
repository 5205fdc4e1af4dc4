"""The Python API: arguments become command-line overrides, objects become files; job errors and public names."""

import ast
import dataclasses
import functools
import json
import linecache
import operator
import os
import subprocess
import sys
from enum import Enum
from pathlib import Path

import cloudpickle
import datasets
import hydra
import numpy as np
import pandas as pd
import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra

import rlfuse
from rlfuse.api import commands, functions, jobs
from rlfuse.api.functions import function_reference, reward_entries
from rlfuse.api.inputs import data_file, job_file
from rlfuse.api.jobs import Job
from rlfuse.api.words import as_hydra, setting_words
from rlfuse.config.compose import load
from rlfuse.config.schema import Config
from rlfuse.data.rows import read_raw_rows
from rlfuse.errors import ConfigError, DataError, EngineError, RewardError, RunError
from rlfuse.rewards.api.functions import load_function
from rlfuse.rewards.api.items import item_of_row

ROOT = Path(__file__).resolve().parents[2]
ROWS = [{"prompt": "What is 1 + 1?", "answer": "2"}, {"prompt": "ü\n", "answer": None, "more": [1, {"a": 0.1}]}]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Return an empty working folder with a model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2", "max_position_embeddings": 4096}')
    return tmp_path


# Words ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"trainer": {"total_training_steps": 20}}, ["trainer.total_training_steps=20"]),
        ({"actor": {"optim": {"lr": 1e-6}}, "rollout": {"n": 8}}, ["actor.optim.lr=1e-06", "rollout.n=8"]),
        ({"actor": {"optim.lr": 0.5}}, ["actor.optim.lr=0.5"]),
        ({"algorithm": "grpo", "fusion": "serial"}, ["algorithm=grpo", "fusion=serial"]),
        ({"trainer": {}}, []),
        ({"ref": {"path": None}, "data": {"shuffle": False}}, ["ref.path=null", "data.shuffle=false"]),
        ({"rollout": {"engine_kwargs": {"a": [1, "x"]}}}, ["rollout.engine_kwargs={a: [1, 'x']}"]),
        ({"actor": {"strategy": Enum("Strategy", {"FSDP": "fsdp2"}, type=str).FSDP}}, ["actor.strategy='fsdp2'"]),
        ({"actor_rollout_ref": {"rollout": {"n": 2}}}, ["actor_rollout_ref.rollout.n=2"]),
        (
            {
                "actor": {"optim": {"lr": np.float64(1e-6), "betas": np.array([0.5, 1.0])}},
                "rollout": {"n": np.int64(8)},
            },
            ["actor.optim.lr=1e-06", "actor.optim.betas=[0.5, 1.0]", "rollout.n=8"],
        ),
    ],
)
def test_settings_become_command_line_overrides(settings, words):
    assert setting_words(settings) == words


@pytest.mark.parametrize(
    "value",
    ["", "it's", "a\\'b\\", "x,y=[1]{z}: ${", "null", "1", "~/a b", "tab\t", "ü", ["a", ["b"]], {"a b": {"c,d:=": 1}}],
)
def test_strings_reach_the_job_unchanged(value):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    word = f"key={as_hydra(value, 'key')}"
    found = OverridesParser.create().parse_override(word).value()
    plain = json.loads(json.dumps(found, default=lambda quoted: quoted.text))
    assert plain == value


def test_a_call_composes_the_same_job_as_its_command():
    (Path() / "my_job.yaml").write_text("rollout: {n: 4}\nalgorithm: grpo\ndata: {train_batch_size: 8}\n")
    rows = [{"path": "my.py:f", "weight": 0.5, "sources": ["a b", "c:*"], "kwargs": {"k": "v,'w'"}}, "other.py:g"]
    Path("my.py").write_text("def f(solution_str, k): return 0\n")
    Path("other.py").write_text("def g(solution_str): return 0\n")
    settings = {"data": {"train_batch_size": 16}, "actor": {"ppo_mini_batch_size": 16}}
    words = commands._words("my_job.yaml", ["rollout.n=2"], "model", rows, {"train": ROWS, "val": None}, settings)
    config = load(words)
    assert (config.rollout.n, config.data.train_batch_size, config.model.path) == (2, 16, "model")
    assert config.reward.functions == rows and config.data.val_files == [] and config.trainer.job_name == "my_job"
    assert [row for _, row in read_raw_rows(config.data.train_files[0])] == ROWS
    by_file = {
        "algorithm": "grpo",
        "rollout": {"n": 2},
        "model": {"path": "model"},
        "reward": {"functions": rows},
        "data": settings["data"] | {"train_files": config.data.train_files},
        "actor": settings["actor"],
    }
    Path("my_job.yaml").write_text(yaml.safe_dump(by_file))
    assert load(["my_job.yaml"]) == config


def test_a_config_object_replaces_a_job_file_and_can_be_overridden():
    config = Config()
    config.model.path, config.rollout.n, config.actor.optim.lr = "model", 3, 1e-5
    config.trainer.project_name = "1e-5"
    assert job_file(assigned("model.path", Path("model")), {}) == job_file(assigned("model.path", "model"), {})
    config.data.train_files = [data_file(ROWS, "train")]
    config.reward.functions = ["rlfuse.tasks.remainder:compute_score"]
    assert load([job_file(config, {})]) == dataclasses.replace(
        config, trainer=dataclasses.replace(config.trainer, job_name=None)
    )
    given = load(commands._words(config, ["rollout.n=5"], None, None, {}, {"algorithm": "grpo"}))
    assert given.rollout.n == 5 and given.algorithm.adv_estimator == "grpo" and given.actor.optim.lr == 1e-5


@pytest.mark.parametrize(
    ("overrides", "settings"),
    [
        (["algorithm=grpo"], {}),
        ([], {"algorithm": "grpo"}),
        (["algorithm=rloo"], {"algorithm": "grpo"}),
        (["algorithm='grpo'", "experiment=null", "algorithm={lam: 0.9}"], {}),
    ],
)
def test_fields_of_a_config_override_presets(overrides, settings, capsys):
    config = Config()
    config.model.path, config.rollout.n = "model", 4
    config.actor.loss_agg_mode = default = Config().actor.loss_agg_mode
    config.data.train_files = [data_file(ROWS, "train")]
    config.reward.functions = ["rlfuse.tasks.remainder:compute_score"]
    given = load(commands._words(config, overrides, None, None, {}, settings | {"actor": {"ppo_epochs": 2}}))
    assert (given.rollout.n, given.algorithm.adv_estimator, given.actor.ppo_epochs) == (4, "grpo", 2)
    assert given.actor.use_kl_loss, "set by the preset"
    assert given.actor.loss_agg_mode == default, "an assigned default overrides the preset"
    assert "overridden" not in "".join(capsys.readouterr())


def test_the_run_of_a_config_is_named_after_its_experiment():
    data = {"val_files": []}
    words = commands._words(Config(), ["experiment=judge"], "model", "math:sqrt", {"train": ROWS}, {"data": data})
    assert load(words).trainer.job_name == "judge"


def test_environment_secrets_are_not_written(monkeypatch):
    monkeypatch.setenv("SERVICE_API_KEY", "abcdefgh12345678")
    config = Config()
    config.reward.functions = [{"path": "a.py:f", "kwargs": {"api_key": "abcdefgh12345678"}}]
    assert "abcdefgh" not in (text := Path(job_file(config, {})).read_text()) and "${oc.env:SERVICE_API_KEY}" in text


def assigned(key, value):
    """Return a `Config` with an attribute set."""
    config = Config()
    group, _, name = key.rpartition(".")
    setattr(operator.attrgetter(group)(config), name, value)
    return config


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (
            {"trianer": {"save_freq": 1}},
            ConfigError,
            "trianer: is not an argument or a group of keys; did you mean trainer",
        ),
        ({"train_dataset": ROWS}, ConfigError, r"train_dataset: is not an argument .* did you mean dataset\?"),
        ({"prompts": ROWS}, ConfigError, r"prompts: is not an argument .* did you mean dataset\?"),
        ({"args": {}}, ConfigError, "args: is not an argument or a group of keys$"),
        ({"learning_rate": 1e-5}, ConfigError, "is a name of TRL; use `actor.optim.lr`; write actor.optim.lr=1e-05"),
        ({"lr": 1e-5}, ConfigError, "lr=1e-05: unknown key; did you mean actor.optim.lr"),
        ({"algorithm": None, "job": Config()}, ConfigError, "algorithm=null: null is not a preset"),
        ({"job": Config(), "fusion": "a,b"}, ConfigError, "fusion=a,b: several values"),
        ({"data": {"train_files": pd.DataFrame(ROWS)}}, ConfigError, "DataFrame; .* pass it as the argument `dataset`"),
        ({"trainer": {"save_freq": object()}}, ConfigError, "trainer.save_freq: got object; a setting is a number"),
        (
            {"trainer": {"metrics": [len]}},
            ConfigError,
            "trainer.metrics: got builtin.* path/file.py:name",
        ),
        ({"actor": {"optim": {"lr": "fast"}}}, ConfigError, "actor.optim.lr=fast"),
        ({"trainer": {"project_name": b"x"}}, ConfigError, "trainer.project_name: got bytes; a setting is a number"),
        ({"rollout": {"engine_kwargs": {"ü": 1}}}, ConfigError, "rollout.engine_kwargs: the key 'ü' has characters"),
        ({"job": {"rollout.n": 4}}, ConfigError, "{'rollout.n': 4}: is a dict; pass a job file"),
        (
            {"job": [Config()]},
            ConfigError,
            r"^The .*\n  \[Config\(.{52}: is a list; pass a job file or a rlfuse.Config first",
        ),
        ({"job": rlfuse.Run(Path("nowhere"))}, ConfigError, "nowhere: is a Run; pass a job file"),
        ({"job": "--multirun"}, ConfigError, "--multirun: is an option of the command line"),
        ({"job": assigned("actor.optim.leraning_rate", 1)}, ConfigError, "actor.optim.leraning_rate: unknown key"),
        (
            {"job": assigned("reward.functions", [len])},
            ConfigError,
            "reward.functions: got .* as the argument `reward`",
        ),
        ({"dataset": pd.DataFrame({"prompt": ["a", 1]})}, DataError, "train: can't be written as a Parquet file"),
        ({"reward": 3}, RewardError, "reward: got int; pass a function"),
        ({"reward": lambda x: x}, RewardError, "reward function <lambda>"),
        ({"reward": functools.partial(lambda x: x)}, RewardError, "reward function <lambda> has the parameters"),
        ({"dataset": 3}, DataError, "train: got int; pass a list of rows"),
        ({"dataset": []}, DataError, "train: has no rows"),
        ({"dataset": ["a.parquet", "b.parquet"]}, DataError, "train: a.parquet is a file; .* data={'train_files'"),
        ({"eval_dataset": [Path("rows")]}, DataError, "val: rows is a file; pass several files as data={'val_files'"),
        ({"dataset": [functools.reduce(lambda row, _: {"a": row}, range(9999))]}, DataError, "train, row 0: maximum"),
        ({"dataset": [1]}, DataError, "train, row 0: a row must be a dictionary, not int"),
        ({"dataset": [{"prompt": b"x"}]}, DataError, "train, row 0: a value of type bytes can't be written as JSON"),
        (
            {"dataset": [{"prompt": "a"}, {"prompt": float("nan")}]},
            DataError,
            "train, row 1: Out of range float",
        ),
        ({"dataset": [{"prompt": "\ud800"}]}, DataError, "train, row 0: 'utf-8' codec can't encode"),
        ({"dataset": {"train": ROWS, "test": ROWS}}, DataError, r"is a dictionary \(train, test\); pass one"),
        ({"model": rlfuse.Run(Path("nowhere"))}, RunError, "nowhere has no checkpoint"),
    ],
)
def test_invalid_arguments_are_refused_before_a_process_starts(arguments, error, message, monkeypatch):
    monkeypatch.setattr(commands, "Job", None)
    with pytest.raises(error, match=message):
        rlfuse.train(**{"model": "model", "dataset": ROWS, "reward": "math:sqrt"} | arguments)


@pytest.mark.parametrize(
    ("function", "argument", "meant"),
    [(rlfuse.evaluate, "eval_dataset", "dataset"), (rlfuse.generate, "dataset", "prompts")],
)
def test_an_argument_of_another_function_is_reported_with_its_counterpart(function, argument, meant):
    with pytest.raises(ConfigError, match=f"{argument}: is not an argument .* did you mean {meant}"):
        function("algorithm=grpo", model="model", **{argument: ROWS})


def test_a_call_does_not_change_the_state_of_the_program(monkeypatch, capsys):
    """Check the environment, Hydra, and the output; notes are printed by the job's process."""
    monkeypatch.setattr(commands, "Job", lambda folder, command, result: command)
    Path("my_job.yaml").write_text("rollout: {n: 4}\n")
    reward = "rlfuse.tasks.remainder:compute_score"
    with hydra.initialize(version_base=None, config_path=None):
        command = rlfuse.start("my_job.yaml", "algorithm=grpo", model="model", dataset=ROWS, reward=reward)
        assert GlobalHydra.instance().is_initialized()
    assert "algorithm=grpo" in command and "".join(capsys.readouterr()) == ""
    assert "PYTHONSAFEPATH" not in os.environ


# Datasets ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows, expected",
    [
        (ROWS, ROWS),
        ([{"prompt": "a", "x": np.float32(0.5), "y": np.arange(2)}], [{"prompt": "a", "x": 0.5, "y": [0, 1]}]),
        (["a", "b"], [{"prompt": "a"}, {"prompt": "b"}]),
        ([[{"role": "user", "content": "a"}]], [{"prompt": [{"role": "user", "content": "a"}]}]),
        (pd.DataFrame({"prompt": ["a", "b"], "answer": [1, 2]})[1:], [{"prompt": "b", "answer": 2}]),
        (datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}]).select([1]), [{"prompt": "b"}]),
    ],
    ids=["rows", "numpy", "texts", "messages", "pandas", "datasets"],
)
def test_rows_are_deduplicated_by_content(rows, expected):
    path = data_file(rows, "train")
    assert [row for _, row in read_raw_rows(path)] == expected
    assert Path(path).stem == "train" and not Path(path).is_absolute()
    changed = os.stat(path).st_mtime_ns
    assert data_file(rows, "train") == path and os.stat(path).st_mtime_ns == changed
    assert data_file("given.parquet", "train") == "given.parquet" == data_file(Path("given.parquet"), "train")


# Functions -----------------------------------------------------------------------------------------------------------

CLOSURE = """
import sys
sys.path.insert(0, {folder!r})
import neighbour
from rlfuse.api.functions import function_reference

class Length:
    UNITS = {{"a", "b", "c"}}
    def of(self, text):
        return len(text) if text not in {{"one", "two", "three"}} else 0

def shipped(bonus):
    def even(solution_str, ground_truth):
        return neighbour.half(Length().of(solution_str)) + bonus
    return even

if __name__ == "__main__":
    print(function_reference(shipped(1)), function_reference(lambda solution_str: 7.0))
"""


def scored(reference, response="four"):
    code = f"""
from rlfuse.rewards.api.functions import load_function
from rlfuse.rewards.api.items import item_of_row
item = item_of_row({{"prompt": "p", "response": {response!r}, "ground_truth": "x", "data_source": "s"}}, 0)
[outcome] = load_function({reference!r}).score([item])
print(getattr(outcome, "traceback", None) or outcome.value)
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_functions_defined_in_a_script_run_in_another_process(folder):
    """Cover closures, lambdas, and modules next to the script."""
    (folder / "other").mkdir()
    (folder / "other" / "neighbour.py").write_text("def half(n): return n / 2\n")
    (folder / "script.py").write_text(CLOSURE.format(folder=str(folder / "other")))
    command, found = [sys.executable, "script.py"], []
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        found.append(
            subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
        )
    assert found[0] == found[1]
    assert [scored(each) for each in found[0]] == ["3.0", "7.0"]
    assert [each.rpartition(":")[2] for each in found[0]] == ["even", "reward"]


@pytest.mark.slow
def test_tracebacks_show_the_lines_of_notebook_cells():
    """Use a cell as in notebooks: its file name has the kernel's process id, and its source is only in `linecache`."""
    source = "def brief(solution_str):\n    limit = 0\n    return 1 / limit  # wrong\n"
    references = []
    for process in (11, 12):
        file = f"/nowhere/ipykernel_{process}/3141.py"
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        values = {"__name__": "__main__"}
        exec(compile(source, file, "exec"), values)
        references.append(function_reference(values["brief"]))
    assert references[0] == references[1], "a restarted kernel resumes the run"
    shown = scored(references[0])
    assert 'File "<3141.py>", line 3, in brief' in shown and "return 1 / limit  # wrong" in shown


def local(solution_str):
    return 1.0


class Judge:
    """Object with a reward method that takes samples."""

    def score(self, samples):
        return [len(each.response) for each in samples]


@dataclasses.dataclass
class WithPath:
    """Callable with a field `path`, as in entries of reward.functions."""

    path: str

    def __call__(self, solution_str):
        return float(len(self.path))


@functools.lru_cache(maxsize=2)
def half(number):
    return number / 2


def test_importable_functions_are_passed_by_name(folder, monkeypatch):
    from rlfuse.tasks.remainder import compute_score

    (folder / "mine_too.py").write_text("def f(solution_str): return 0\nclass A:\n    def g(self): return 0\n")
    monkeypatch.syspath_prepend(str(folder))
    import mine_too

    assert function_reference(compute_score) == "rlfuse.tasks.remainder:compute_score"
    assert function_reference(mine_too.f) == "mine_too.py:f"
    assert reward_entries([{"path": mine_too.f, "weight": 2}, "a.py:f", Path("b.py:g")]) == [
        {"path": "mine_too.py:f", "weight": 2}, "a.py:f", "b.py:g",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "function, name, value",
    [
        (functools.partial(lambda solution_str, by: by, by=4.0), "reward", 4.0),
        (Judge(), "Judge", 5.0),
        (WithPath("of a model"), "WithPath", 10.0),
        (functools.cache(lambda solution_str: float(half(12))), "reward", 6.0),
    ],
)
def test_objects_are_pickled_by_value(function, name, value):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        reference = function_reference(function)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert reference.endswith(f"/{name}.py:{name}")
    item = item_of_row({"prompt": "p", "response": "12345", "ground_truth": "x", "data_source": "s"}, 0)
    [outcome] = load_function(reference).score([item])
    assert outcome.value == value


def test_functions_that_cannot_be_pickled_are_refused(monkeypatch):
    lock = __import__("threading").Lock()

    def locked(solution_str):
        return float(lock.locked())

    with pytest.raises(RewardError, match=r"reward locked: can't be sent to the processes of the job \(TypeError: "):
        function_reference(locked)
    monkeypatch.setattr(functions, "MAX_BYTES", 1 << 20)
    large = np.zeros(1 << 18)
    with pytest.raises(RewardError, match="refers to 2 MiB of objects, above the limit of 1 MiB"):
        function_reference(lambda solution_str: large)


# Errors of a job -----------------------------------------------------------------------------------------------------

FAILING = """
from rlfuse.application import run_command
from rlfuse.errors import ConfigError, EngineError, NodeLost

class Unknown(Exception):
    pass

def fail():
    try:
        {{}}["absent"]
    except KeyError as cause:
        raise {error} from cause

raise SystemExit(run_command(fail))
"""


def failed(error):
    job, lines = Job(Path("runs"), [sys.executable, "-c", FAILING.format(error=error)], rlfuse.Run), []
    with pytest.raises(Exception) as caught:
        job.follow(60, lines.append)
    assert lines == [], "the message is in the raised error only"
    return caught.value


@pytest.mark.slow
def test_a_job_error_is_raised_with_its_cause():
    lost = failed("NodeLost('node 7 was lost', ('7',))")
    assert isinstance(lost, EngineError) and str(lost) == "node 7 was lost" and lost.nodes == ("7",)
    assert isinstance(lost.__cause__, KeyError) and lost.__cause__.args == ("absent",)
    assert "in fail" in lost.__cause__.__notes__[0]
    wrong = failed("ConfigError(['a=1: wrong', 'b=2: too'])")
    assert isinstance(wrong, ConfigError) and wrong.problems == ["a=1: wrong", "b=2: too"]
    defect = failed("Unknown('of the job alone')")
    assert type(defect) is RuntimeError and "Unknown: of the job alone" in str(defect)
    assert isinstance(defect.__cause__, KeyError)


@pytest.mark.parametrize("child", ["", "__import__('subprocess').Popen(['sleep', '30']);"])
def test_a_killed_job_raises_a_job_error(child, monkeypatch):
    """Raise even if a child process survives and keeps the job's output open."""
    monkeypatch.setattr(jobs, "OUTPUT_S", 0.5)
    code = f"import os; {child} print('last', flush=True); os.kill(os.getpid(), 9)"
    job = Job(Path("runs"), [sys.executable, "-c", code], str)
    with pytest.raises(rlfuse.JobError, match=r"status -9:\nlast"):
        job.follow(20, lambda line: None)


def test_a_third_interrupt_kills_the_job(monkeypatch):
    job = Job(Path("runs"), [sys.executable, "-c", "import time; time.sleep(60)"], str)
    pressed = []

    def press(wait_s):
        pressed.append(wait_s)
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "_interrupt", press)
    job.stop(show=lambda line: None)
    assert len(pressed) == 2 and not job.running


def test_a_failing_call_stops_the_job():
    job = Job(Path("runs"), [sys.executable, "-c", "import time; time.sleep(60)"], str)
    with pytest.raises(TypeError):
        job.follow("10")
    assert not job.running


# Results -------------------------------------------------------------------------------------------------------------


def test_a_run_object_reads_its_folder(folder):
    run = rlfuse.Run(ROOT / "notebooks" / "data" / "run")
    assert len(run.metrics.loc[1:]) == 12 and len(run.samples) == 384 and run.summary["steps"] == 12
    assert run.checkpoint is None is run.model and Path(run) == run.folder == Path(str(run))
    for step in (2, 10):
        (folder / f"global_step_{step}" / "actor" / "huggingface").mkdir(parents=True)
        (folder / f"global_step_{step}" / "COMPLETE").touch()
    assert rlfuse.Run(folder).model == folder / "global_step_10" / "actor" / "huggingface"


def test_responses_are_read_in_the_order_of_the_prompts(folder, monkeypatch):
    row = {"data_source": "s", "prompt": "p", "response": "r", "finish": "stop", "prompt_tokens": 1, "note": None}
    row |= {"response_tokens": 1, "reward": None, "parts": {}, "ground_truth": "", "columns": {}}
    written = []

    def job(file, command, result):
        file.write_text("".join(json.dumps({"id": f"3/{at}/0", **row}) + "\n" for at in (10, 2)))
        written.append(command[3:])
        return type("Followed", (), {"follow": lambda self, *_: result(file)})()

    monkeypatch.setattr(commands, "Job", job)
    found = rlfuse.generate(model="model", prompts=["a", "b"], out="out.jsonl", algorithm="grpo", rollout={"n": 2})
    assert [*found["id"]] == ["3/2/0", "3/10/0"] and [*found["step"]] == [3, 3] and found["reward"].isna().all()
    [(command, *words)] = written
    assert command == "rlfuse.cli" or words[0] == "generate"
    assert words[-3:] == ["model", "algorithm=grpo", "rollout.n=2"] and "--score" not in words


@pytest.mark.slow
def test_a_plan_has_tables_and_a_verdict():
    settings = {"model": "model", "algorithm": "grpo", "rollout": {"n": 4}}
    large, small = (rlfuse.plan(**settings, device_memory=memory) for memory in (2000, 8))
    assert large.fits and str(large).rstrip().endswith("fits") and "Memory in GiB" in large.text
    assert not small.fits and "does not fit" in small.text
    for wrong, message in ((-1, "--device-memory -1: needs a number above 0"), ("much", "invalid float value: 'much'")):
        with pytest.raises(ConfigError, match=message):
            rlfuse.plan(**settings, device_memory=wrong)
    recorded = rlfuse.plan(**settings, device_memory=2000, costs_from=rlfuse.Run(ROOT / "notebooks" / "data" / "run"))
    assert "typical slot of the run" in recorded.text


# Names ---------------------------------------------------------------------------------------------------------------


def test_public_names_are_declared_for_editors_and_imported_lazily():
    tree = ast.parse((ROOT / "rlfuse" / "__init__.pyi").read_text())
    imported = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    declared = {(node.module, alias.name) for node in imported for alias in node.names}
    assert declared == {(f"rlfuse.{module}", name) for module, names in rlfuse.PUBLIC.items() for name in names}
    assert {name for _, name in declared} < {*rlfuse.__all__} <= {*dir(rlfuse)}
    assert all(getattr(rlfuse, name) is not None for name in rlfuse.__all__)
    code = "import sys, rlfuse; print([each for each in sys.modules if each in {'torch', 'pandas', 'hydra', 'yaml'}])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


IMPORT_ALL = """
import importlib, pkgutil, sys
import rlfuse
failed = {}
for each in pkgutil.walk_packages(rlfuse.__path__, "rlfuse."):
    try:
        importlib.import_module(each.name)
    except ImportError as error:
        failed[each.name] = str(error)
import rlfuse.train
from rlfuse import train
assert rlfuse.train is train is sys.modules["rlfuse.train"] and callable(train), rlfuse.train
try:
    rlfuse.train(rollout={"nn": 2})
except rlfuse.ConfigError as error:
    print("did you mean" in str(error), len(sys.modules), failed)
"""


@pytest.mark.slow
def test_the_function_train_is_not_shadowed_by_a_module():
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, timeout=500)
    assert "True" in done.stdout.split(), done.stdout + done.stderr
    command = [sys.executable, "-m", "rlfuse.train", "rollout.nn=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "did you mean" in done.stderr
