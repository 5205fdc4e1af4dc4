"""`rlfuse submit`: the job package, logs and errors, without a cluster."""

import enum
import sys
import threading
import types
from pathlib import Path

import pytest
import yaml

from rlfuse import cli, user_folders
from rlfuse.cluster.worker_environment import SUBMITTED
from rlfuse.config.compose import compose_job, load, to_config
from rlfuse.config.facts import Facts
from rlfuse.config.schema import Config
from rlfuse.errors import ConfigError
from rlfuse.tools import job_package, submission
from rlfuse.tools.job_package import CODE, pack
from rlfuse.tools.submission import SubmitError, follow, full_address, status_of


@pytest.fixture
def user_folder(tmp_path, monkeypatch):
    """Return a folder of a user with a reward file."""
    folder = tmp_path / "user"
    (folder / "mine" / "words").mkdir(parents=True)
    (folder / "mine" / "reward.py").write_text("def score(completions, **_): return [1.0 for _ in completions]\n")
    (folder / "mine" / "words" / "list.txt").write_text("a b c")
    (folder / "data.jsonl").write_text("")
    monkeypatch.chdir(folder)
    return folder


def config_of(*words) -> Config:
    fixed = ["data.train_files=[data.jsonl]", "model.path=Qwen/Qwen2.5-0.5B", "algorithm=grpo"]
    fixed += ["reward.functions=[mine/reward.py:score]"]
    return to_config(compose_job([*fixed, *words]), lambda _: Facts())


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_package_is_the_job_and_its_reward_files(user_folder, tmp_path):
    (tmp_path / "package").mkdir()
    (user_folder / "checkpoint.safetensors").write_bytes(bytes(1000))
    package = pack(config_of("trainer.experiment_name=run-${now:%Y}"), tmp_path / "package", user_folder)
    assert files(package.folder / SUBMITTED) == ["job.yaml", "mine/reward.py"]
    sent = yaml.safe_load((package.folder / SUBMITTED / "job.yaml").read_text())
    assert sent["data"]["train_files"] == [f"{user_folder}/data.jsonl"] and sent["model"]["path"] == "Qwen/Qwen2.5-0.5B"
    assert sent["trainer"]["default_local_dir"] == f"{user_folder}/runs", (
        "the working folder of the job is deleted with it"
    )
    assert sent["cluster"]["ray_address"] == "auto" and "$" not in sent["trainer"]["experiment_name"]
    assert package.experiment == f"rlfuse/{sent['trainer']['experiment_name']}"
    assert f"must exist on every node: {user_folder}/data.jsonl, {user_folder}/runs" in package.notes


def test_entries_are_packaged_with_code_and_judges_by_path(user_folder, tmp_path):
    (tmp_path / "package").mkdir()
    entries = "{path: mine/reward.py:score, weight: 0.5}, {path: judge, kwargs: {model: ./judge}}, 'http://host:80/get'"
    package = pack(config_of(f"reward.functions=[{entries}]"), tmp_path / "package", user_folder)
    code, judge, service = yaml.safe_load((package.folder / SUBMITTED / "job.yaml").read_text())["reward"]["functions"]
    assert code == {"path": "mine/reward.py:score", "weight": 0.5} and service == "http://host:80/get"
    assert judge["kwargs"]["model"] == f"{user_folder}/judge" and "mine/reward.py" in files(package.folder / SUBMITTED)


def test_custom_algorithms_and_policies_are_packaged(user_folder, tmp_path):
    (tmp_path / "package").mkdir()
    (user_folder / "mine" / "own.py").write_text("def loss(log_probs): ...\n\n\ndef policy(view): ...\n")
    (user_folder / "mine" / "figures.py").write_text("def longest(samples): ...\n")
    keys = ("actor.loss_mode=mine/own.py:loss", "fusion.policy=mine/own.py:policy")
    config = config_of(*keys, "trainer.metrics=[mine/figures.py:longest]")
    package = pack(config, tmp_path / "package", user_folder)
    sent = yaml.safe_load((package.folder / SUBMITTED / "job.yaml").read_text())
    assert files(package.folder / SUBMITTED) == ["job.yaml", "mine/figures.py", "mine/own.py", "mine/reward.py"]
    assert (sent["actor"]["loss_mode"], sent["fusion"]["policy"]) == ("mine/own.py:loss", "mine/own.py:policy")
    assert sent["trainer"]["metrics"] == ["mine/figures.py:longest"]


@pytest.mark.slow
def test_the_cluster_composes_the_same_job(user_folder, tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    (user_folder / "model").mkdir()
    (user_folder / "model" / "config.json").write_text('{"max_position_embeddings": 4096, "num_attention_heads": 4}')
    (user_folder / "model" / "tokenizer.json").touch()
    numeric_name = "trainer.project_name='1e-5'"
    config = config_of("model.path=model", "rollout.n=6", "rollout.engine_kwargs.enforce_eager=true", numeric_name)
    monkeypatch.chdir(pack(config, tmp_path / "package", user_folder).folder / SUBMITTED)
    composed = load(["job.yaml"])
    assert composed.rollout == config.rollout and composed.actor == config.actor and composed.fusion == config.fusion
    assert composed.trainer.project_name == "1e-5"
    assert composed.model.path == f"{user_folder}/model" and composed.reward.functions == ["mine/reward.py:score"]


@pytest.mark.slow
def test_files_outside_the_folder_and_their_imports(user_folder, tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    outside = tmp_path / "other.py"
    outside.write_text("def f(): ...\n")
    names = f"reward.functions=[{outside}:f,/on/the/cluster.py:g,json:loads,mine/reward.py:score]"
    package = pack(config_of(names), tmp_path / "package", user_folder, [Path("mine/words")])
    sent = ["job.yaml", "mine/reward.py", "mine/words/list.txt", "rewards/other.py"]
    assert files(package.folder / SUBMITTED) == sent
    sent = yaml.safe_load((package.folder / SUBMITTED / "job.yaml").read_text())["reward"]["functions"]
    assert sent == ["rewards/other.py:f", "/on/the/cluster.py:g", "json:loads", "mine/reward.py:score"]
    with pytest.raises(ConfigError) as error:
        functions = "reward.functions=[absent.py:f]"
        pack(config_of(functions), tmp_path / "package", user_folder, [Path("nothing"), Path("../other.py"), Path(".")])
    assert [problem.split()[0] for problem in error.value.problems] == ["reward.functions:"] + 3 * ["--include"]
    monkeypatch.setattr(job_package, "MAX_BYTES", 10)
    with pytest.raises(ConfigError, match="put large files on shared storage"):
        pack(config_of(), tmp_path / "package", user_folder)


def test_modules_next_to_the_job_file_are_packaged(user_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(user_folders, "module_folders", user_folders.module_folders[:0])
    monkeypatch.setattr(job_package, "module_folders", user_folders.module_folders)
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "mine_rewards" / "math").mkdir(parents=True)
    (elsewhere / "mine_rewards" / "__init__.py").touch()
    (elsewhere / "mine_rewards" / "math" / "sums.py").write_text("def score(completions, **_): ...\n")
    (elsewhere / "mine_module.py").write_text("def score(completions, **_): ...\n")
    (elsewhere / "unrelated.py").touch()
    names = ["mine_rewards.math.sums:score", "mine_module:score", "rlfuse.rewards.verifiers.math:score", "json:loads"]
    (elsewhere / "job.yaml").write_text(f"reward: {{functions: [{', '.join(names)}]}}\n")
    words = ["data.train_files=[data.jsonl]", "model.path=a/b", "algorithm=grpo"]
    config = to_config(compose_job([str(elsewhere / "job.yaml"), *words]), lambda _: Facts())
    package = pack(config, tmp_path / "package", user_folder)
    sent = ["job.yaml", "mine_module.py", "mine_rewards/__init__.py", "mine_rewards/math/sums.py"]
    assert files(package.folder / SUBMITTED) == sent


@pytest.mark.slow
def test_the_code_is_packaged_on_request(user_folder, tmp_path):
    (tmp_path / "package").mkdir()
    package = pack(config_of(), tmp_path / "package", user_folder, with_code=True)
    assert (package.folder / "rlfuse" / "cli.py").read_text() == (CODE / "cli.py").read_text()
    assert (package.folder / "rlfuse/conf/config.yaml").is_file() and not list(package.folder.rglob("__pycache__"))
    assert package.notes[0].endswith("job.yaml, mine/reward.py and rlfuse")


@pytest.mark.slow
def test_errors_are_reported_before_submission(user_folder, capsys, monkeypatch):
    monkeypatch.setattr(submission, "_connect", lambda arguments: pytest.fail("nothing is to be sent"))
    for words, part in (
        (["actor.lr=3"], "did you mean actor.optim.lr"),
        (["algorithm=grpo", "rollout.n=1"], "data.train_files: is required"),
        (["-m", "rollout.n=2,4"], "takes files and key=value only"),
        (["--env", "NOT_SET_ANYWHERE", *WORDS], "--env NOT_SET_ANYWHERE: not set here"),
    ):
        assert cli.main(["submit", *words]) == 2
        assert part in capsys.readouterr().err


WORDS = ["data.train_files=[data.jsonl]", "model.path=a/b", "reward.functions=[mine/reward.py:score]"]


def test_addresses_and_statuses():
    assert full_address("head") == "http://head:8265" and full_address("10.0.0.1:9000") == "http://10.0.0.1:9000"
    assert full_address("https://ray.example.org") == "https://ray.example.org"
    ends = [("SUCCEEDED", 0), ("FAILED", 2), ("FAILED", 75), ("FAILED", None), ("STOPPED", None)]
    assert [status_of(*end) for end in ends] == [0, 2, 75, 1, 1]


class Status(enum.Enum):
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"


class Cluster:
    """Fake of Ray's client whose connection breaks after each of `parts` except the last."""

    def __init__(self, *parts, down=0):
        self.parts, self.calls, self.down = list(parts), 0, down

    def get_job_status(self, job):
        if self.down:
            self.down -= 1
            raise ConnectionError("the network is gone")
        return Status.SUCCEEDED if self.calls >= len(self.parts) - 1 else Status.RUNNING

    async def tail_job_logs(self, job):
        self.calls += 1
        for part in self.parts[: self.calls]:  # from the start each time, like Ray
            yield part
        if self.calls < len(self.parts):
            raise RuntimeError("WebSocket connection closed unexpectedly")


async def test_a_log_is_shown_once_despite_broken_connections(monkeypatch):
    monkeypatch.setattr(submission, "RETRY_S", 0.0)
    output = []
    await follow(Cluster("a\nb\n", "c\n", "d\n", down=2), "job", output.append)
    assert "".join(output) == "a\nb\nc\nd\n"


async def test_an_unreachable_cluster_is_an_error(monkeypatch):
    monkeypatch.setattr(submission, "RETRY_S", 0.0)
    monkeypatch.setattr(submission, "OUTAGE_S", 0.0)
    with pytest.raises(SubmitError, match="cluster unreachable for 0 s"):
        await follow(Cluster("a", down=10**9), "job", lambda text: None)


def test_rejections_by_the_cluster_describe_the_fix(monkeypatch, tmp_path):
    def refuse(text):
        raise RuntimeError(text)

    with pytest.raises(SubmitError, match="--token-file"):
        submission._bounded(lambda: refuse("Request failed with status code 401"), "submit the job")
    with pytest.raises(SubmitError, match="--dashboard-agent-listen-port=PORT"):
        submission._bounded(lambda: refuse("status code 500: No available agent to submit job"), "submit the job")
    with pytest.raises(SubmitError, match="check --address"):
        submission._bounded(lambda: refuse("Failed to connect"), "connect")
    monkeypatch.setattr(submission, "CALL_S", 0.01)
    answered = threading.Event()
    with pytest.raises(SubmitError, match=r"no answer in 0\.01 s"):
        submission._bounded(lambda: answered.wait(60), "connect")
    answered.set()
    arguments = types.SimpleNamespace(token_file=tmp_path / "absent", address="http://a:1")
    with pytest.raises(SubmitError, match="no such file"):
        submission._connect(arguments)


@pytest.mark.parametrize(
    "jobs", [[], [types.SimpleNamespace(submission_id="raysubmit_1", metadata={"owner": "other"})]]
)
def test_status_without_jobs(jobs, capsys):
    submission._status(types.SimpleNamespace(list_jobs=lambda: jobs), None)
    assert capsys.readouterr().out == "The cluster has no jobs of `rlfuse submit`.\n"
