"""Reserves slots on the two nodes of the Ray cluster at the address given: as Ray has them, in the opposite order of
cluster.node_order, and in that of a node that is not there. Prints a line of JSON."""

import asyncio
import json
import sys

import ray

from rlfuse.cluster import placement
from rlfuse.config.schema import Config
from rlfuse.errors import EngineError


def node_of(slots, slot):
    """Id of the node where an actor of this slot lives."""
    asked = ray.remote(lambda: ray.get_runtime_context().get_node_id()).options(**slots.options(slot, 0.5))
    return ray.get(asked.remote(), timeout=60)


async def main(address):
    """Try all three."""
    config = Config()
    config.trainer.nnodes, config.trainer.n_gpus_per_node = 2, 1
    config.cluster.device, config.cluster.ray_address, config.cluster.timeout_s = "cpu", address, 20
    slots = await placement.start(config)
    found = {"usual": [node.id for node in slots.nodes]}
    ray.shutdown()
    first, second = slots.nodes
    config.cluster.node_order = [second.id[:8], first.id]
    slots = await placement.start(config)
    found["ordered"] = [node_of(slots, slot) for slot in range(2)]
    ray.shutdown()
    config.cluster.node_order, config.cluster.timeout_s = ["10.9.8.7"], 2
    try:
        await placement.start(config)
    except EngineError as error:
        found["absent"] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
