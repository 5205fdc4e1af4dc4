"""Starts a Ray cluster of a head without GPUs and a node that declares one, and reserves slots in it.

Prints a line of JSON for each configuration: the device and its summary, or the error.
"""

import asyncio
import json

import ray
from ray.cluster_utils import Cluster

from rlfuse.cluster import placement
from rlfuse.config.schema import Config
from rlfuse.errors import EngineError

NODE = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 << 20}
JOBS = {"one GPU": ("auto", 1, 120.0), "two GPUs": ("auto", 2, 1.0), "CPUs": ("cpu", 2, 120.0)}


async def slots_of(address: str, device: str, nodes: int, timeout_s: float) -> list[str]:
    config = Config()
    config.cluster.ray_address, config.cluster.device, config.cluster.timeout_s = address, device, timeout_s
    config.trainer.n_gpus_per_node, config.trainer.nnodes = 1, nodes
    try:
        slots = await placement.start(config)
    except EngineError as error:
        return ["none", str(error)]
    finally:
        ray.shutdown()
    return [slots.device, slots.summary, [node.total.get("GPU", 0) for node in slots.nodes]]


if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"num_gpus": 0, "resources": {"slot": 1}})
    cluster.add_node(**NODE, num_gpus=1, resources={"slot": 1})
    for name, job in JOBS.items():
        print(json.dumps([name, *asyncio.run(slots_of(cluster.address, *job))]), flush=True)
    cluster.shutdown()
