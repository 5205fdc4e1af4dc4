"""Reward functions that leak memory with each call, in real processes."""

import numpy as np

from rlfuse.config.rewards import RewardConfig
from rlfuse.rewards.workers.pool import RewardPool
from rlfuse.samples import Prompt, Response, Sample

FUNCTIONS = """
KEPT = []

def leaking(solution_str):
    KEPT.append(b"x" * 30 * 2**20)
    return len(bytearray(10 * 2**30) if solution_str == "hog" else solution_str)

def leaking_batch(completions):
    return [leaking(completion[0]["content"]) for completion in completions]
"""


async def test_a_leaking_function_is_restarted_and_every_sample_gets_its_reward(ray_cluster, tmp_path):
    """100 MiB suffice for three calls; `hog` exceeds them in any process."""
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    entries = [{"path": f"{tmp_path}/mine.py:{name}", "weight": 1.0} for name in ("leaking", "leaking_batch")]
    pool = RewardPool(RewardConfig(entries, timeout_s=60, memory_mb=100))
    prompt = Prompt(4, np.array([3], np.int32), "w3 ", ({"role": "user", "content": "w3"},), "", "", {})
    texts = ["a", "bb", "ccc", "hog", "dddd", "eeeee"]
    responses = [Response(np.array([6], np.int32), np.zeros(1, np.float32), "stop", 0, text) for text in texts]
    await pool.start()
    results = await pool.score([Sample(prompt, 2, k, k, response) for k, response in enumerate(responses)])
    restarts = [span for span in await pool.drain() if span.kind == "restart"]
    await pool.close()
    assert [getattr(result, "value", None) for result in results] == [2.0, 4.0, 6.0, None, 8.0, 10.0]
    assert "MemoryError" in results[3].message and 3 <= len(restarts) <= 8
    assert all("ran out of memory: earlier calls did not free theirs" in span.cause for span in restarts)
