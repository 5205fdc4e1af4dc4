"""Imports compiled schedules, loads DeepSpeed's operation and starts Ray, as a user without a home directory in the
installation of another user. Prints JSON: the message on caches, the folder of extensions, and the slots."""

import asyncio
import json
import os

from rlfuse.user_folders import redirect_caches

if __name__ == "__main__":
    message = redirect_caches()
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    from rlfuse.cluster import placement
    from rlfuse.config.schema import Config
    from rlfuse.engines.deepspeed import deepspeed_ops
    from rlfuse.fusion.schedules import list_scheduling  # noqa: F401 - numba looks for its cache at import

    assert deepspeed_ops.load(ShareMemCommBuilder().load) is None
    config = Config()
    config.cluster.device, config.trainer.n_gpus_per_node = "cpu", 1
    slots = asyncio.run(placement.start(config)).summary
    placement.stop()
    print(json.dumps([message, os.environ["TORCH_EXTENSIONS_DIR"], slots]))
