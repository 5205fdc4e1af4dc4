"""Engine and ranks share a GPU or alternate on it; size of the KV cache in plan and run."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import transformers
from test_plan import SEVEN_B, sizes
from test_plan_models import FAMILIES, job

from rlfuse.engines.memory.estimate import GIB, Budget, Moved, memory_of
from rlfuse.engines.memory.model_sizes import read_shape
from rlfuse.engines.memory.remedies import problems
from rlfuse.engines.memory.residency import ENGINE, GENERATING, MODELS, PHASES, Item
from rlfuse.engines.memory.sharing import device_sharing
from rlfuse.engines.vllm.setup import memory_arguments
from rlfuse.errors import ConfigError
from rlfuse.protocols import DeviceSharing
from rlfuse.run import inference
from rlfuse.run.starting import SharedDevices

pytestmark = pytest.mark.slow


class Ranks:
    sharing = DeviceSharing()

    async def device_bytes(self):
        return 80 * GIB

    async def share(self, sharing):
        self.sharing = sharing


async def start_job(folder, **changes):
    """Return, for 80 GiB GPUs: sharing, messages, engine arguments, and whether engines start with the ranks."""
    config, ranks, messages, started, early = job(**changes), Ranks(), [], [], []
    config.model.path = str(folder)
    shared = SharedDevices(config, messages.append)

    async def start(on_ready):
        await on_ready(ranks)
        assert ranks.sharing == DeviceSharing(), "a memory limit must not apply to loading"
        return ranks, {"facts": 1}

    async def engine(model, rollout, *_):
        started.append(rollout)

    slots = SimpleNamespace(cores=None, device="cuda")
    handle = SimpleNamespace(start=engine)
    parts = inference.engine_starts([handle], config, slots, lambda name: nullcontext(), lambda: shared.rollout)
    assert await shared.start(start, lambda: early.append(True)) == (ranks, {"facts": 1})
    await parts[0]()
    return ranks.sharing, messages, started[0].engine_kwargs, bool(early)


@pytest.fixture
def small(tmp_path):
    FAMILIES["qwen2"].save_pretrained(tmp_path / "small")
    return str(tmp_path / "small")


@pytest.fixture
def large(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SEVEN_B))
    return str(tmp_path)


async def test_both_stay_if_they_fit_and_the_engine_receives_its_cache_size(small):
    sharing, messages, arguments, early = await start_job(small)
    assert early, "vLLM measures no memory, so ranks can load at the same time"
    assert not sharing.alternates and 0 < sharing.max_rank_bytes < 80 * GIB
    assert (
        not arguments["enable_sleep_mode"]
        and arguments["kv_cache_memory_bytes"] > 0
        and arguments["gpu_memory_utilization"] < 0.1
    )
    assert len(messages) == 1 and "both stay on the device" in messages[0] and "GiB of KV cache" in messages[0]


async def test_they_alternate_on_request_and_user_arguments_take_precedence(small):
    user_arguments = {"gpu_memory_utilization": 0.3, "enforce_eager": True}
    sharing, messages, arguments, early = await start_job(
        small, rollout__free_cache_engine=True, rollout__engine_kwargs=user_arguments
    )
    assert not early
    assert sharing.alternates and sharing.max_cached_bytes > 30 * GIB and sharing.pinned_host_bytes > 0
    assert (
        "enable_sleep_mode" not in arguments
        and arguments.items() >= user_arguments.items()
        and "alternate" in messages[0]
    )


async def test_they_alternate_without_a_memory_plan(tmp_path):
    transformers.MambaConfig(num_hidden_layers=2, hidden_size=32, vocab_size=64).save_pretrained(tmp_path)
    sharing, messages, arguments, early = await start_job(tmp_path)
    assert not early
    assert (
        sharing == DeviceSharing()
        and arguments == {}
        and "alternate on each GPU, because its memory can't be" in messages[0]
    )
    with pytest.raises(ConfigError, match=r"model\.path"):
        await start_job(tmp_path, rollout__free_cache_engine=False)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"actor__ppo_max_token_len_per_gpu": 400_000}, ["training: needs", "GiB of a device's 80.00", "It fits with"]),
        ({"rollout__gpu_memory_utilization": 0.01}, ["generating: the KV cache has no room next to the engine"]),
    ],
    ids=["too much", "no cache"],
)
async def test_sharing_is_rejected_if_both_do_not_fit(changes, parts, large):
    with pytest.raises(ConfigError) as error:
        await start_job(large, rollout__free_cache_engine=False, **changes)
    assert all(part in str(error.value) for part in ("rollout.free_cache_engine=false: engine and trainer", *parts))


def test_an_engine_without_memory_for_a_cache_alternates(small):
    config = job(rollout__gpu_memory_utilization=1e-6)
    memory = memory_of(config, {"actor": read_shape(small, "model.path")}, Budget("cuda", 80 * GIB))
    assert memory.alternates, "vLLM measures the memory for a cache of 0 bytes"


HYBRID = [
    transformers.JambaConfig(num_hidden_layers=2, hidden_size=32, vocab_size=64, num_attention_heads=4,
                             num_key_value_heads=2, intermediate_size=32, attn_layer_period=2, attn_layer_offset=1,
                             use_mamba_kernels=False, num_experts=2),
    transformers.FalconH1Config(num_hidden_layers=2, hidden_size=32, vocab_size=64, num_attention_heads=4,
                                num_key_value_heads=2, intermediate_size=32),
    transformers.Lfm2Config(num_hidden_layers=2, hidden_size=32, vocab_size=64, num_attention_heads=4,
                            num_key_value_heads=2, layer_types=["conv", "full_attention"]),
]  # fmt: skip


@pytest.mark.parametrize("config", HYBRID, ids=lambda config: config.model_type)
def test_models_with_recurrent_states_have_no_memory_plan(config, tmp_path):
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="states that memory plans do not support"):
        read_shape(str(tmp_path), "model.path")


async def test_engines_wait_for_ranks_if_vllm_measures_its_cache(small):
    changes = dict(rollout__free_cache_engine=False, rollout__engine_kwargs={"num_gpu_blocks_override": 9})
    sharing, _, arguments, early = await start_job(small, **changes)
    assert not sharing.alternates and "kv_cache_memory_bytes" not in arguments and not early


# Memory plans


def test_an_engine_gets_the_cache_that_a_step_needs(large):
    shape, longest = read_shape(large, "model.path"), 2048
    limits = dict(data__max_prompt_length=1024, data__max_response_length=1024, rollout__max_num_seqs=16)

    def planned(gib=80, **changes):
        return memory_of(job(**(limits | changes)), {"actor": shape}, Budget("cuda", gib * GIB))

    token = 2 * 2 * 28 * 4 * 128  # keys and values in bfloat16, in 28 layers of 4 heads of 128 numbers
    for sequences in (16, 32):
        memory = planned(rollout__max_num_seqs=sequences)
        assert memory.kv_cache_bytes == (sequences + 1) * longest * token == sizes(memory, "engine")["KV cache"]
        assert memory.kv_tokens >= sequences * longest
    assert planned(fusion__tail_speculation=2).kv_cache_bytes == 17 * (longest + 128) * token, "drafts, in whole blocks"
    assert planned(rollout__tensor_model_parallel_size=2).kv_cache_bytes == 17 * longest * token / 2
    share = planned(rollout__max_num_seqs=1024, rollout__free_cache_engine=True)
    assert share.kv_cache_bytes is None, "the engine's share of the device is smaller than this cache"
    assert share.size_of(ENGINE) == pytest.approx(40 * GIB)
    explicit = planned(rollout__engine_kwargs={"kv_cache_memory_bytes": GIB})
    assert sizes(explicit, "engine")["KV cache"] == GIB and explicit.kv_cache_bytes is None
    assert planned(rollout__engine_kwargs={"num_gpu_blocks_override": 9}).kv_cache_bytes is None


def test_engine_and_ranks_alternate_only_if_they_do_not_fit(small, large):
    def planned(path, gib, **changes):
        config = job(**changes)
        return config, memory_of(config, {"actor": read_shape(path, "model.path")}, Budget("cuda", gib * GIB))

    _, both = planned(small, 80)
    assert not both.alternates and both.moved == Moved() and both.host == 0
    assert both.total(both.tightest) <= 0.9 * 80 * GIB
    engine = {("engine", what) for what in ("parameters", "KV cache", "work space")}
    for phase in PHASES[1:]:
        resident = {(part.role, part.what) for part in both.of(phase)}
        assert resident >= engine | {("actor", "parameters"), ("actor", "optimizer")}, phase
    assert memory_arguments(both) == {
        "kv_cache_memory_bytes": both.kv_cache_bytes,
        "enable_sleep_mode": False,
        "gpu_memory_utilization": round(sum(sizes(both, "engine")[what] for _, what in engine) / (80 * GIB), 4),
    }
    shared = device_sharing(both)
    assert not shared.alternates and shared.max_rank_bytes == 80 * GIB - both.size_of(
        ENGINE | {Item.RESIDENTS, Item.LAYER}
    )
    _, alternating = planned(large, 80)
    assert alternating.alternates and alternating.moved.all > 14 * GIB and alternating.host > 0
    share = alternating.size_of(ENGINE) / (80 * GIB)
    arguments = {
        "kv_cache_memory_bytes": alternating.kv_cache_bytes,
        "gpu_memory_utilization": pytest.approx(share, abs=1e-4),
    }
    assert memory_arguments(alternating) == arguments and share < 0.45
    assert alternating.size_of(ENGINE) + device_sharing(alternating).max_cached_bytes < 73 * GIB, (
        "another engine starts next to the memory that ranks keep"
    )
    shared = device_sharing(alternating)
    assert (
        shared.alternates
        and shared.max_cached_bytes == int(72 * GIB - alternating.total(GENERATING))
        and shared.max_rank_bytes is None
    )
    assert shared.pinned_host_bytes == int(alternating.size_of(MODELS))
    for alternates, path in ((True, small), (False, large)):
        config, forced = planned(path, 80, rollout__free_cache_engine=alternates)
        assert forced.alternates == alternates
    assert problems(config, forced)[0].startswith("loading") or "needs" in problems(config, forced)[0]
    _, unknown = planned(small, 80, rollout__engine_kwargs={"num_gpu_blocks_override": 9})
    assert unknown.alternates, "vLLM measures the device after the ranks released it"
