"""Imports of ranks and engines, which the fork server of a CPU host loads once (`cluster.fork_server`)."""

import os

from rlfuse.engines.vllm.importing import CPU_ENVIRONMENT, import_vllm

os.environ.update(CPU_ENVIRONMENT)
import_vllm()
import deepspeed  # noqa: E402, F401
