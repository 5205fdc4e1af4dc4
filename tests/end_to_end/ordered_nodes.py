"""Reserves slots on the two nodes of the Ray cluster at the address given: in Ray's order, in the opposite order by
cluster.node_order, with the address of an absent node, and while another process (`hold`) has them. Prints JSON."""

import asyncio
import json
import socket
import subprocess
import sys

import ray

from rlfuse.cluster import joining, nodes, placement
from rlfuse.config.schema import Config
from rlfuse.errors import EngineError


def node_of(slots, slot):
    """Return the id of the node on which this slot's actors run."""
    node_id = ray.remote(lambda: ray.get_runtime_context().get_node_id()).options(**slots.options(slot, 0.5))
    return ray.get(node_id.remote(), timeout=240)


def job(address):
    """Return the configuration of a job on two nodes."""
    config = Config()
    config.trainer.nnodes, config.trainer.n_gpus_per_node = 2, 1
    config.cluster.device, config.cluster.ray_address, config.cluster.timeout_s = "cpu", address, 120
    return config


async def hold(address):
    """Reserve all slots until the input ends; print the error if the reservation is lost earlier."""
    config = job(address)
    config.trainer.n_gpus_per_node = 2
    slots = await placement.start(config)
    print("held", flush=True)
    try:
        await nodes.fail_on_lost_node(ended(joining.request(sys.stdin.read)), slots.occupants())
    except EngineError as error:
        print(error)


async def ended(answer):
    await asyncio.wrap_future(answer)


async def refused(config):
    """Return the error message of a job that gets no slots."""
    try:
        await placement.start(config)
    except EngineError as error:
        return str(error)
    finally:
        ray.shutdown()


async def busy(address):
    """Return the messages to a job while another has all slots, with a timeout that expires and one that suffices."""
    command, pipes = [sys.executable, __file__, address, "hold"], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    other, config, placement.FIRST_NOTICE_S = subprocess.Popen(command, **pipes), job(address), 0.5
    assert other.stdout.readline() == b"held\n"
    config.cluster.timeout_s = 1
    found = {"holder": other.pid, "busy": await refused(config)}
    config.cluster.timeout_s = 60
    waiting = asyncio.create_task(placement.start(config))
    await asyncio.sleep(1.5)
    other.stdin.close()
    await waiting
    ray.shutdown()
    return found


async def main(address):
    """Run all cases."""
    config = job(address)
    slots = await placement.start(config)
    found = {"usual": [node.id for node in slots.nodes]}
    ray.shutdown()
    first, second = slots.nodes
    config.cluster.node_order = [second.id[:8], first.id]
    slots = await placement.start(config)
    found["ordered"] = [node_of(slots, slot) for slot in range(2)]
    ray.shutdown()
    config.cluster.node_order, config.cluster.timeout_s = ["10.9.8.7"], 2
    found["absent"] = await refused(config)
    found |= await busy(address)
    with socket.create_server(("", 0)) as silent:
        joining.HANDSHAKE_S = 1
        found["silent"] = await refused(job(f"127.0.0.1:{silent.getsockname()[1]}"))
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(hold(sys.argv[1]) if sys.argv[2:] == ["hold"] else main(sys.argv[1]))
