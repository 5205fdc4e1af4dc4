"""Starts a Ray cluster of two nodes with two slots each on this machine, and adds a node per line of its input.

Prints the address and the pids of both raylets as JSON, then the raylet's pid of each added node. Stops when its input
ends.
"""

import json
import sys

from ray.cluster_utils import Cluster

NODE = {
    "num_cpus": 2,
    "resources": {"slot": 2},
    "include_dashboard": False,
    "object_store_memory": 100 << 20,
}


def raylet(node):
    return node.all_processes["raylet"][0].process.pid


if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    raylets = [raylet(node) for node in (cluster.head_node, cluster.add_node(**NODE))]
    print(json.dumps({"address": cluster.address, "raylets": raylets}), flush=True)
    for _ in sys.stdin:
        print(raylet(cluster.add_node(**NODE)), flush=True)
    cluster.shutdown()
