"""Check `rollout.quantization`: vLLM quantizes the weights again at every weight transfer. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rlfuse.config.documentation import by_name
from rlfuse.config.facts import Facts
from rlfuse.config.schema import Config

KEY = "rollout.quantization"
CPU_METHOD = "fp8_per_channel"
"""The one for which vLLM has what it takes on any CPU, but for experts: others need its kernels for GPUs, or AMX."""
EXPERTS_ONLY = "int8_per_channel_weight_only"
"""The one that leaves all other layers as they are."""
UNQUANTIZED_LAYERS = ("*.gate", "*visual.*")
"""Layers, by vLLM's names, that stay as they are: routers, which would choose other experts than are trained, and
towers, which compute nothing in an engine and have sizes that vLLM's kernels refuse."""
VLLM_KEYS = ("quantization", "quantization_config")


def quantized(config: Config, facts: Facts) -> Iterator[str]:
    """What is wrong with it, a line each."""
    given, arguments = config.rollout.quantization, config.rollout.engine_kwargs
    for name in (name for name in VLLM_KEYS if arguments.get(name) is not None):
        yield (
            f"rollout.engine_kwargs.{name}={arguments[name]}: other weights than those that are trained need "
            f"importance correction, and bounds of their own; set {KEY} in its place"
        )
    if given not in by_name()[KEY].names:  # null, or invalid, which another check reports
        return
    if config.algorithm.rollout_is_threshold is None:
        yield (
            f"{KEY}={given}: generates with other weights than those that are trained, so it needs importance "
            f"correction; set algorithm.rollout_is_threshold=2, or {KEY}=null"
        )
    if config.model.dtype != "bfloat16":
        yield f"{KEY}={given}: is made of weights in bfloat16; set model.dtype=bfloat16, or {KEY}=null"
    if facts.cuda is False and facts.experts:
        valid = f"{config.model.path} is a mixture of experts, which vLLM quantizes on GPUs alone"
        yield f"{KEY}={given}: {valid}; set {KEY}=null"
    elif facts.cuda is False and given != CPU_METHOD:
        yield f"{KEY}={given}: needs GPUs, for which alone vLLM has its kernels; set {KEY}={CPU_METHOD}"
    if facts.experts is False and given == EXPERTS_ONLY:
        yield f"{KEY}={given}: {config.model.path} has no experts, and no other layers change; set {KEY}={CPU_METHOD}"
