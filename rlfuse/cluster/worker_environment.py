"""The variables of every process that Ray starts for a run. Imported before Ray, which reads some of them then."""

import os
import re

from rlfuse.cluster import cuda
from rlfuse.progress import QUIET_LIBRARIES
from rlfuse.user_folders import redirect_caches

# One thread per process: slots share the cores of a CPU host, and two OpenMP pools on one core cost 10x (measured).
CPU_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_task_events_report_interval_ms": "0",  # every call of a run would be kept, for Ray's dashboard
    # A worker for each core before anybody asks: most here have an environment of their own, and Ray starts others.
    "RAY_prestart_worker_first_driver": "0",
} | QUIET_LIBRARIES
LAUNCHER = re.compile(
    r"(OMPI_COMM_WORLD|PMI|PMIX|MV2_COMM_WORLD|PALS|JSM_NAMESPACE|FLUX_TASK|TORCHELASTIC|ACCELERATE_USE|FSDP)_"
    r"|(SLURM_(PROCID|LOCALID|NODEID|NTASKS|NPROCS)|MPI_LOCAL(RANKID|NRANKS)|OMPI_UNIVERSE_SIZE|MASTER_(ADDR|PORT))$"
    r"|(((LOCAL|GROUP|ROLE|CROSS|NODE)_)?(RANK|WORLD_SIZE)|(LOCAL|CROSS)_SIZE)$"
)
"""Variables by which mpirun, srun, torchrun, accelerate and deepspeed give a process its place among others. DeepSpeed
compares them with the run's own ranks, torch connects to torchrun's store, and Transformers leaves out weights."""


def prepare_worker() -> None:
    """Set up the environment of a worker on a node of a running Ray cluster, which may have been started anyhow."""
    clear_launcher_variables()
    redirect_caches()


def clear_launcher_variables() -> None:
    """Remove the variables of an outer launcher from this process: the run assigns ranks itself."""
    for name in filter(LAUNCHER.match, [*os.environ]):
        del os.environ[name]


def worker_environment(device: str) -> dict[str, str]:
    """Environment of every worker process."""
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = {"TORCH_EXTENSIONS_DIR": extensions} if extensions else {}
    return QUIET | (CPU_ENVIRONMENT if device == "cpu" else cuda.environment(cuda.worker_settings())) | cache
