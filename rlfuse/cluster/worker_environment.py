"""The variables of every process that Ray starts for a run. Imported before Ray, which reads some of them then."""

import os

from rlfuse.cluster import cuda
from rlfuse.progress import QUIET_LIBRARIES

# One thread per process: slots share the cores of a CPU host, and two OpenMP pools on one core cost 10x (measured).
CPU_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_task_events_report_interval_ms": "0",  # every call of a run would be kept, for Ray's dashboard
    # A worker for each core before anybody asks: most here have an environment of their own, and Ray starts others.
    "RAY_prestart_worker_first_driver": "0",
} | QUIET_LIBRARIES


def worker_environment(device: str) -> dict[str, str]:
    """Environment of every worker process."""
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = {"TORCH_EXTENSIONS_DIR": extensions} if extensions else {}
    return QUIET | (CPU_ENVIRONMENT if device == "cpu" else cuda.environment(cuda.worker_settings())) | cache
