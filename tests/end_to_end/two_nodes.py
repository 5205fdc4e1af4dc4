"""A Ray cluster of two nodes with two slots each on this machine, until its input ends.

Prints a line: its address and the process ids of both nodes' raylets.
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

if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    nodes = [cluster.head_node, cluster.add_node(**NODE)]
    raylets = [node.all_processes["raylet"][0].process.pid for node in nodes]
    print(json.dumps({"address": cluster.address, "raylets": raylets}), flush=True)
    sys.stdin.read()
    cluster.shutdown()
