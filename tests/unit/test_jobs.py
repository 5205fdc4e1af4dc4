"""Files of jobs/: scripts parse, configurations are valid, and GPU jobs fit the GPUs that they name."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
import yaml

from rlfuse.config.compose import compose_job, to_config
from rlfuse.config.facts import Facts
from rlfuse.engines.memory.estimate import GIB, Budget, memory_of
from rlfuse.engines.memory.model_sizes import read_shape
from rlfuse.engines.memory.remedies import problems
from rlfuse.tasks.prepare import TASKS

JOBS = Path(__file__).resolve().parents[2] / "jobs"
PACKAGE = JOBS.parent / "rlfuse"
SCRIPTS = sorted([*JOBS.glob("*.sh"), *JOBS.glob("*.slurm")])
JOB_FILES = sorted(path for path in JOBS.glob("*.yaml") if "apiVersion" not in path.read_text())
SHARED = {"model_type": "qwen2", "vocab_size": 151936, "max_position_embeddings": 32768, "num_hidden_layers": 28}
MODELS = {
    "Qwen/Qwen2.5-7B-Instruct": SHARED | {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
                                          "num_key_value_heads": 4, "vocab_size": 152064},
    "Qwen/Qwen2.5-1.5B-Instruct": SHARED | {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12,
                                            "num_key_value_heads": 2, "tie_word_embeddings": True},
}  # fmt: skip


def composed(*words):
    """Compose and check a configuration, except for the files of other machines."""
    return to_config(compose_job(list(words)), lambda _: Facts())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(script):
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_prepare_commands_name_a_task():
    """Check all scripts: `prepare` without a task lists the tasks, writes nothing, and exits with status 0."""
    prepares = re.compile(r"^ *(?:rlfuse|python -m rlfuse\.cli) prepare\b(.*)$", re.M)
    named = [task for script in SCRIPTS for task in prepares.findall(script.read_text())]
    assert len(named) >= 5 and all(task.split() and task.split()[0] in TASKS for task in named), named


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_commands_in_scripts_are_valid_jobs(script):
    """Compose the arguments of commands, and of the examples in comments."""
    text = script.read_text().replace("\\\n", " ").replace('"$SLURM_JOB_NUM_NODES"', "2").replace('"$gpus"', "8")
    lines = [line for line in text.splitlines() if re.search(r"rlfuse\.train |bash jobs/|sbatch ", line)]
    name = re.search(r"experiment=(\w+)", text)
    for line in lines:
        words = [word for word in line.split() if re.match(r"[a-z_]+[.\w]*=", word) or word.endswith(".yaml")]
        if not words or script.stem in ("install", "environment"):
            continue
        base = [f"experiment={name[1]}"] if name and "experiment=" not in line else []
        files = [str(JOBS.parent / word) if word.endswith(".yaml") else word for word in words]
        if not base and not any(word.endswith(".yaml") or word.startswith("experiment=") for word in words):
            files.insert(0, str(JOBS / "ppo_7b.yaml"))
        assert composed(*base, *files).data.train_files, line


@pytest.mark.slow
@pytest.mark.parametrize("path", JOB_FILES, ids=lambda path: path.name)
def test_job_files_are_valid_and_fit_their_gpus(path, tmp_path):
    config = composed(str(path))
    (tmp_path / "config.json").write_text(json.dumps(MODELS[config.model.path]))
    shapes = {"actor": read_shape(str(tmp_path), "model.path")}
    if config.uses_critic:
        shapes["critic"] = read_shape(str(tmp_path), "critic.path", value=True)
    if config.uses_reference:
        shapes["reference"] = shapes["actor"]
    promised = min(int(size) for size in re.findall(r"of (\d0)\b", path.read_text().partition("\n")[0]))
    assert promised in (40, 80) and config.cluster.device == "cuda"
    assert problems(config, memory_of(config, shapes, Budget("cuda", promised * GIB))) == []


@pytest.mark.slow
def test_kuberay_job_matches_its_configuration():
    job = yaml.safe_load((JOBS / "several_nodes.kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    words = job["spec"]["entrypoint"].split()
    config = composed(str(JOBS / Path(words[2]).name), *words[3:])
    assert words[:2] == ["rlfuse", "train"] and config.cluster.ray_address == "auto"
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    start = workers["rayStartParams"]
    slots = json.loads(json.loads(start["resources"]))["slot"]
    assert config.trainer.nnodes == workers["replicas"] and config.trainer.n_gpus_per_node == slots == 8
    (container,) = workers["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == start["num-gpus"] == "8"
    version = next(line for line in (JOBS.parent / "pyproject.toml").read_text().splitlines() if '"ray[' in line)
    assert f">={cluster['rayVersion'].removesuffix('.0')}," in version
    assert cluster["authOptions"] == {"mode": "token"}
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        mounted = {mount["name"] for each in pod["containers"] for mount in each["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]} == {"shared", "memory"}


def test_slurm_log_needs_no_folder_and_the_token_is_removed_on_exit(tmp_path):
    """Write the log where sbatch was called: if its folder does not exist, Slurm ends the job without a message."""
    text = (JOBS / "several_nodes.slurm").read_text()
    (log,) = re.findall(r"#SBATCH --output=(\S+)", text)
    assert "/" not in log and log.replace("%j", "*") in (JOBS.parent / ".gitignore").read_text().split()
    before_ray = text[text.index("set -euo pipefail") : text.index("# From a cold network file system")]
    environment = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7", "PATH": os.environ["PATH"]}
    script = before_ray.replace("python -c", f"{sys.executable} -c") + 'stat -c "%a %s" "$RAY_AUTH_TOKEN_PATH"\n'
    ran = subprocess.run(
        ["bash", "-c", script, "sbatch", "a_job.yaml"], env=environment, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stdout) == (0, "600 65\n"), ran.stderr
    assert (tmp_path / "runs").is_dir() and not list((tmp_path / "runs").iterdir()), "the token outlives the script"


def test_every_node_imports_the_packages_before_ray_timeouts_start():
    lines = (JOBS / "several_nodes.slurm").read_text().splitlines()
    (read,) = (index for index, line in enumerate(lines) if line.startswith("srun") and "import " in line)
    (start,) = (index for index, line in enumerate(lines) if line.startswith("srun") and "symmetric-run" in line)
    assert read < start
    site = Path(sysconfig.get_path("purelib"))
    for module in re.findall(r"[\w.]+", re.search(r"'import (.*)'", lines[read])[1]):
        path = site / module.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").exists()
    source = (site / "ray/scripts/symmetric_run.py").read_text()
    raised = dict(re.findall(r"(RAY_\w+)=(\d+)", "\n".join(lines[read:start])))
    assert int(raised["RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT"]) == int(raised["RAY_worker_register_timeout_seconds"])
    assert 'env_integer("RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT"' in source


def imports(path):
    """Return the third-party modules that a notebook or script imports; packages have the same names."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = (cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
        text = "\n".join("".join(cell["source"]) for cell in cells)
    modules = set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE))
    return modules - set(sys.stdlib_module_names) - {"rlfuse", "my_reward_model"}  # a cell writes the latter


def test_notebook_extra_installs_what_notebooks_import():
    project = tomllib.loads((JOBS.parent / "pyproject.toml").read_text())["project"]
    names = {
        extra: {re.match(r"[\w.-]+", line)[0].lower(): line for line in lines}
        for extra, lines in (project["optional-dependencies"] | {"": project["dependencies"]}).items()
    }
    available = names[""].keys() | names["notebook"].keys()
    files = [*JOBS.parent.glob("notebooks/*.*"), *JOBS.parent.glob("rlfuse/tools/notebook/*.py")]
    files = [path for path in files if path.suffix in (".py", ".ipynb")]
    assert len(files) > 8
    for path in files:
        assert imports(path) <= available, path.name
    assert {"jupyterlab", "ipykernel"} <= available, "needed to open notebooks and to run their cells"
    shared = names["dev"].keys() & names["notebook"].keys()
    assert all(names["dev"][name] == names["notebook"][name] for name in shared)


def test_data_files_are_installed_with_the_package():
    tools = tomllib.loads((JOBS.parent / "pyproject.toml").read_text())["tool"]
    installed = {path for each in tools["setuptools"]["package-data"]["rlfuse"] for path in PACKAGE.glob(each)}
    files = [path for path in PACKAGE.rglob("*.*") if path.is_file() and path.parent.name != "__pycache__"]
    data_files = {path for path in files if path.suffix not in (".py", ".md")}
    assert data_files == installed
