"""Environment variables of all processes that Ray starts for a run. Imported before Ray, which reads some at import."""

import os
import re
import sys
from typing import Any

from rlfuse.cluster import cuda
from rlfuse.progress import QUIET_LIBRARIES
from rlfuse.user_folders import SAFE_PATH, append_modules, keep_compiled_kernels, module_folders, redirect_caches

# One thread per process: slots share the cores of a CPU host, and two OpenMP pools on one core cost 10x (measured).
CPU_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
MODULES = "RLFUSE_MODULES"
"""Environment variable of workers: folders of the user's modules, by default those of the driver."""
SUBMITTED = "job"
"""Folder below the root of a submitted package, which Ray puts first on the path of every process."""
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_enable_metrics_collection": "0",  # Ray would serve them on a port without authentication
    "RAY_task_events_report_interval_ms": "0",  # otherwise every call is recorded for Ray's dashboard
    # No prestarted worker per core: most workers here have a separate environment, for which Ray starts others.
    "RAY_prestart_worker_first_driver": "0",
} | QUIET_LIBRARIES
LAUNCHER = re.compile(
    r"(OMPI_COMM_WORLD|PMI|PMIX|MV2_COMM_WORLD|PALS|JSM_NAMESPACE|FLUX_TASK|TORCHELASTIC|ACCELERATE_USE|FSDP)_"
    r"|(SLURM_(PROCID|LOCALID|NODEID|NTASKS|NPROCS)|MPI_LOCAL(RANKID|NRANKS)|OMPI_UNIVERSE_SIZE|MASTER_(ADDR|PORT))$"
    r"|(((LOCAL|GROUP|ROLE|CROSS|NODE)_)?(RANK|WORLD_SIZE)|(LOCAL|CROSS)_SIZE)$"
)
"""Rank variables of mpirun, srun, torchrun, accelerate and deepspeed. They are removed: DeepSpeed compares them with
the run's ranks, torch connects to torchrun's store, and Transformers skips weights."""


def job_environment() -> dict[str, Any]:
    """Return the `runtime_env` of a run's workers, which find modules where the driver does."""
    script = os.path.dirname(os.path.realpath(sys.argv[0]))
    found = dict.fromkeys([os.getcwd(), *([script] if script in sys.path else []), *module_folders])
    folders = os.pathsep.join(found)
    set_by_user = os.environ.get(MODULES, folders)
    given = {} if set_by_user == SUBMITTED else {MODULES: set_by_user}  # Ray adds the folder of `rlfuse submit`
    hook = f"{prepare_worker.__module__}.{prepare_worker.__name__}"
    return {"env_vars": SAFE_PATH | given, "worker_process_setup_hook": hook}


def prepare_worker() -> None:
    """Set up a worker, whose node may be one of a running Ray cluster and have any environment."""
    clear_launcher_variables()
    redirect_caches()
    keep_compiled_kernels()
    folders = os.environ[MODULES].split(os.pathsep)
    if folders == [SUBMITTED]:
        os.chdir(SUBMITTED)
        folders = [os.getcwd()]
    append_modules(*folders)


def clear_launcher_variables() -> None:
    """Remove the variables of an outer launcher from this process: the run assigns ranks itself."""
    for name in filter(LAUNCHER.match, [*os.environ]):
        del os.environ[name]


def worker_environment(device: str) -> dict[str, str]:
    """Return the environment of every worker process."""
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = {"TORCH_EXTENSIONS_DIR": extensions} if extensions else {}
    own = CPU_ENVIRONMENT if device == "cpu" else cuda.environment(cuda.worker_settings())
    return QUIET | SAFE_PATH | own | cache
