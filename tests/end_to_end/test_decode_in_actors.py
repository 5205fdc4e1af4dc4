"""A decode pool inside a Ray actor, with a file that hangs; its processes end when the actor is killed."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import ray

from rlfuse.tasks.clips import draw_scene, write_clip
from rlfuse.video.decode_pool import Clip, DecodePool
from rlfuse.video.plan import FixedSampling, plan_video


class Rank:
    """Decodes outside the main thread, in a process in which Ray ignores SIGCHLD."""

    def __init__(self, pool: DecodePool):
        self._pool, self._thread = pool, ThreadPoolExecutor(1)

    def decode(self, paths):
        """Return the shape of each clip's frames or its error, and the pids of the decode workers."""
        return self._thread.submit(self._decode, paths).result(60)

    def _decode(self, paths):
        [facts] = self._pool.probe(paths[:1])
        plan = plan_video(facts, FixedSampling(8, 4))
        results = [getattr(r, "shape", r) for r in self._pool.stream(Clip(path, plan) for path in paths)]
        return results, [child.pid for child in psutil.Process().children()]


def test_a_pool_in_an_actor(ray_cluster, tmp_path):
    good, silent = tmp_path / "good.mp4", tmp_path / "silent.mp4"
    write_clip(draw_scene(np.random.default_rng(0), 10.0, 12.0), good)
    os.mkfifo(silent)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import from tests
    rank = ray.remote(Rank).options(num_cpus=0).remote(DecodePool(timeout_s=1.0))
    results, workers = ray.get(rank.decode.remote([str(good), str(silent), str(good)]), timeout=120)
    assert results[0] == results[2] == (8, 56, 56, 3) and "took longer than 1 s" in str(results[1])
    processes = [psutil.Process(pid) for pid in workers]
    ray.kill(rank)
    _, alive = psutil.wait_procs(processes, timeout=120)
    assert processes and not alive
