"""Reserves slots on the two nodes of the Ray cluster at the address given: as Ray has them, in the opposite order of
cluster.node_order, in that of a node that is not there, and while another process (`hold`) has them. Prints a line of
JSON."""

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
    """Id of the node where an actor of this slot lives."""
    asked = ray.remote(lambda: ray.get_runtime_context().get_node_id()).options(**slots.options(slot, 0.5))
    return ray.get(asked.remote(), timeout=240)


def job(address):
    """A job of two nodes."""
    config = Config()
    config.trainer.nnodes, config.trainer.n_gpus_per_node = 2, 1
    config.cluster.device, config.cluster.ray_address, config.cluster.timeout_s = "cpu", address, 120
    return config


async def hold(address):
    """Take all slots until the input ends. Prints the message of what ends the hold earlier."""
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
    """The message of a job that gets no slots."""
    try:
        await placement.start(config)
    except EngineError as error:
        return str(error)
    finally:
        ray.shutdown()


async def busy(address):
    """What a job is told while another has all slots, with and without time to wait for its end."""
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
    """Try all."""
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
