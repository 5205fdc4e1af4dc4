"""8-bit engines: checks of the configuration, memory and costs in a plan, and bounds of a run."""

import re
from dataclasses import replace

import pytest
from test_plan_search import CLUSTER, Cluster, job_of, shape  # noqa: F401, a fixture

from rlfuse.algorithms.corrections import BOUNDS, QUANTIZED_FACTOR, mismatch_bound
from rlfuse.config.checks import check
from rlfuse.config.facts import Facts
from rlfuse.config.schema import Config, RolloutCorrection
from rlfuse.engines.memory.estimate import quantization_savings
from rlfuse.fusion.selection import label
from rlfuse.observe.alerts import bound_in_steps
from rlfuse.tools.planning.space import axes_of, is_structural

KEY, EXPERTS = "rollout.quantization", "int8_per_channel_weight_only"


def problems(facts=None, **changes):
    """Return the quantization problems of a job that is valid except for `changes`."""
    config = Config()
    config.rollout.quantization, config.model.dtype = "fp8_per_channel", "bfloat16"
    config.algorithm.rollout_correction.rollout_is = "token"
    for key, value in changes.items():
        group, _, name = key.partition("__")
        setattr(getattr(config, group), name, value)
    return [line for line in check(config, facts or Facts()) if "quantization" in line]


@pytest.mark.parametrize("kind", ["fp8_per_channel", "fp8_per_tensor", "fp8_per_block", EXPERTS, None])
def test_each_kind_is_accepted_on_gpus_with_importance_correction(kind):
    assert problems(Facts(cuda=True, experts=True), rollout__quantization=kind) == []


@pytest.mark.parametrize(
    ("facts", "changes", "message"),
    [
        (
            {},
            {"algorithm__rollout_correction": RolloutCorrection()},
            "so it needs importance correction; set algorithm.roll",
        ),
        ({}, {"model__dtype": "float32"}, "quantizes bfloat16 weights; set model.dtype=bfloat16, or rollout.quant"),
        (
            {"cuda": False},
            {"rollout__quantization": "fp8_per_block"},
            "needs GPUs: .*set rollout.quantization=fp8_per_c",
        ),
        ({"cuda": False, "experts": True}, {}, "is a mixture of experts, .* on GPUs only; set rollout.quantization=n"),
        (
            {"cuda": False, "experts": True},
            {"rollout__quantization": EXPERTS},
            "on GPUs only; set rollout.quantization=n",
        ),
        ({"experts": False}, {"rollout__quantization": EXPERTS}, "has no experts, the only layers it quantizes"),
        (
            {},
            {"rollout__quantization": "fp8"},
            "in vLLM this is an 8-bit checkpoint; .*; use one of fp8_per_channel",
        ),
        ({}, {"rollout__quantization": "fp8_per_chanel"}, "is not one of .*did you mean fp8_per_channel"),
        ({}, {"rollout__engine_kwargs": {"quantization": "fp8_per_tensor"}}, "set rollout.quantization instead"),
    ],
)
def test_problems_are_reported_in_one_line(facts, changes, message):
    assert len(found := problems(Facts(**facts), **changes)) == 1
    assert re.search(message, found[0])


def test_cpu_engines_accept_the_kind_with_cpu_kernels():
    assert problems(Facts(cuda=False)) == []


def test_quantized_weights_leave_memory_for_the_kv_cache_and_are_read_faster(shape):  # noqa: F811
    job = job_of(shape, Cluster(**CLUSTER))
    many = ("rollout.max_num_seqs", 1 << 20)  # so that the device limits the cache
    (wide_config, wide), (config, small) = (
        job.with_settings([(KEY, kind), many]) for kind in (None, "fp8_per_channel")
    )
    saved = quantization_savings(config, shape)
    assert quantization_savings(wide_config, shape) == 0 and saved == sum(shape.layers)
    size = {memory: sum(p.size for p in memory.parts if p.role == "engine" and p.what == "parameters")
            for memory in (wide, small)}  # fmt: skip
    assert size[wide] - size[small] == saved and small.kv_tokens > wide.kv_tokens
    assert job.costs(config, small).step_base_s < job.costs(wide_config, wide).step_base_s
    mixture = replace(shape, active=0.3, experts=8, experts_used=1)
    config.rollout.quantization = EXPERTS
    assert quantization_savings(config, mixture) == pytest.approx(0.8 * saved), "only experts are quantized"
    assert quantization_savings(config, shape) == 0


def test_search_tries_quantization_only_if_the_job_sets_it(shape):  # noqa: F811
    config, cluster = Config(), Cluster(**CLUSTER)
    assert axes_of(config, shape, cluster)[KEY] == (None,)
    config.rollout.quantization = "fp8_per_tensor"
    assert axes_of(config, shape, cluster)[KEY] == (None, "fp8_per_tensor") and is_structural(KEY)
    assert axes_of(config, shape, cluster, keep=[KEY])[KEY] == ("fp8_per_tensor",)


def test_quantized_runs_are_off_policy_with_wider_mismatch_bounds():
    assert label("exact", "fp8_per_channel") == "off-policy" and label("exact") == "exact"
    narrow, wide = BOUNDS["bfloat16"], mismatch_bound("bfloat16", "fp8_per_channel")
    assert (wide.mean, wide.most) == (QUANTIZED_FACTOR * narrow.mean, QUANTIZED_FACTOR * narrow.most)
    assert bound_in_steps("bfloat16", 1.0, -1, "exact", 0.0, "fp8_per_channel") == wide
    assert mismatch_bound("bfloat16", None) == narrow
