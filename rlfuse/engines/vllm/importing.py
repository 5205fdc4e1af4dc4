"""Import vLLM. On CPU hosts, modules that engines do not use there are skipped: saves 25 % of the CPU time and 70 MiB.

Must be called before anything else imports vLLM. The skipped modules are hidden only during vLLM's imports.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # read by `engine_death`
    "TOKENIZERS_PARALLELISM": "false",
}
CPU_ENVIRONMENT = ENVIRONMENT | {
    "TORCHDYNAMO_DISABLE": "1",  # no compilation of the sampler: the first generate call takes 0.4 s instead of 6 s
    "OMP_NUM_THREADS": "1",  # engines and trainer share the cores; more threads compete (up to 5 s instead of 0.2 s)
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine core and worker in one process: starts in 11 s instead of 20 s
    "GLOO_SOCKET_IFNAME": "lo",  # the processes of an engine are on one node
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise tensor parallelism on one NUMA node fails to start
}
SKIPPED_ON_CPUS = ("scipy.signal", "torch._inductor.lowering", "ray")
"""Modules for audio, for the compiler, which is off on CPU hosts (`rollout_env`), and for engines on several nodes.
Actors have already imported the last one."""


TRACKERS = ("mlflow",)
"""Imported by accelerate and DeepSpeed if installed, with pandas and pyarrow: 1 s, 100 MiB, and a thread that forks
would lose."""


@contextmanager
def skipped(names: tuple[str, ...]) -> Iterator[None]:
    """Let imports of these modules fail within the block, unless they are already imported."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: Python raises ImportError for the module
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def import_vllm() -> None:
    """Import vLLM's front end and, on CPU hosts, its worker, so that forks of this process inherit both."""
    without = SKIPPED_ON_CPUS if os.environ.get("TORCHDYNAMO_DISABLE") == "1" else ()
    with skipped(without + TRACKERS):
        import vllm.v1.engine.async_llm

        if without:
            import vllm.v1.worker.cpu_worker  # noqa: F401
