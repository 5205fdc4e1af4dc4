"""What a run decides of engines and ranks on its GPUs, and that engines start with it."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import transformers
from test_plan_models import FAMILIES, job

from rlfuse.errors import ConfigError
from rlfuse.planning.memory import GIB
from rlfuse.protocols import Sharing
from rlfuse.run import inference
from rlfuse.run.sharing import SharedDevices

pytestmark = pytest.mark.slow


class Ranks:
    sharing = Sharing()

    async def device_bytes(self):
        return 80 * GIB

    async def share(self, sharing):
        self.sharing = sharing


async def decided(folder, **changes):
    """Of a job on GPUs of 80 GiB: the ranks, what was said, and the engine's settings when it starts."""
    config, ranks, said, started = job(**changes), Ranks(), [], []
    config.model.path = str(folder)
    shared = SharedDevices(config, said.append)

    async def start():
        return ranks, {"facts": 1}

    async def engine(model, rollout, *_):
        started.append(rollout)

    slots = SimpleNamespace(cores=None, device="cuda")
    handle = SimpleNamespace(start=engine)
    parts = inference.engine_starts([handle], config, slots, lambda name: nullcontext(), lambda: shared.rollout)
    assert await shared.after(start) == (ranks, {"facts": 1})
    await parts[0]()
    return ranks.sharing, said, started[0].engine_kwargs


@pytest.fixture
def small(tmp_path):
    FAMILIES["qwen2"].save_pretrained(tmp_path)
    return tmp_path


async def test_both_stay_where_they_fit_and_the_engine_is_given_its_cache(small):
    sharing, said, given = await decided(small)
    assert not sharing.hands_over and 0 < sharing.most < 80 * GIB
    assert (
        not given["enable_sleep_mode"] and given["kv_cache_memory_bytes"] > 0 and given["gpu_memory_utilization"] < 0.1
    )
    assert len(said) == 1 and "both stay on the device" in said[0] and "GiB of KV cache" in said[0]


async def test_they_take_turns_where_the_job_says_so_and_the_user_has_the_last_word(small):
    own = {"gpu_memory_utilization": 0.3, "enforce_eager": True}
    sharing, said, given = await decided(small, rollout__free_cache_engine=True, rollout__engine_kwargs=own)
    assert sharing.hands_over and sharing.cached > 30 * GIB and sharing.pinned > 0
    assert "enable_sleep_mode" not in given and given.items() >= own.items() and "take turns" in said[0]


async def test_they_take_turns_where_no_plan_can_be_made(tmp_path):
    transformers.MambaConfig(num_hidden_layers=2, hidden_size=32, vocab_size=64).save_pretrained(tmp_path)
    sharing, said, given = await decided(tmp_path)
    assert sharing == Sharing() and given == {} and "take turns on each GPU, because its memory can't be" in said[0]
    with pytest.raises(ConfigError, match=r"model\.path"):
        await decided(tmp_path, rollout__free_cache_engine=False)
