"""Imports of ranks and engines, which the fork server of a CPU host loads once (`cluster.fork_server`)."""

import os

from rlfuse.engines.vllm.importing import CPU_ENVIRONMENT, TRACKERS, import_vllm, skipped

os.environ.update(CPU_ENVIRONMENT)
import_vllm()
with skipped(TRACKERS):
    import deepspeed  # noqa: F401
