"""Check `rollout.quantization`: vLLM quantizes the weights again at every weight transfer. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rlfuse.config.documentation import by_name
from rlfuse.config.facts import Facts
from rlfuse.config.schema import Config

KEY = "rollout.quantization"
CPU_METHOD = "fp8_per_channel"
"""The method that vLLM supports on any CPU, except for experts; others need its GPU kernels, or AMX."""
EXPERTS_ONLY = "int8_per_channel_weight_only"
"""The method that quantizes MoE experts only."""
UNQUANTIZED_LAYERS = ("*.gate", "*visual.*")
"""Layers, by vLLM's names, that are not quantized: routers, which would select other experts than the trainer, and
vision towers, which engines do not run and whose sizes vLLM's kernels reject."""
VLLM_KEYS = ("quantization", "quantization_config")


def quantization_problems(config: Config, facts: Facts) -> Iterator[str]:
    """Yield one line per problem of rollout.quantization."""
    given, arguments = config.rollout.quantization, config.rollout.engine_kwargs
    for name in (name for name in VLLM_KEYS if arguments.get(name) is not None):
        yield (
            f"rollout.engine_kwargs.{name}={arguments[name]}: quantized weights need importance "
            f"correction and their own error bounds; set {KEY} instead"
        )
    if given not in by_name()[KEY].names:  # null, or invalid (reported by another check)
        return
    if not config.algorithm.rollout_correction.is_enabled:
        yield (
            f"{KEY}={given}: generates with quantized weights, so it needs importance correction; "
            f"set algorithm.rollout_correction.rollout_is=token, or {KEY}=null"
        )
    if config.model.dtype != "bfloat16":
        yield f"{KEY}={given}: quantizes bfloat16 weights; set model.dtype=bfloat16, or {KEY}=null"
    if facts.cuda is False and facts.experts:
        valid = f"{config.model.path} is a mixture of experts, which vLLM quantizes on GPUs only"
        yield f"{KEY}={given}: {valid}; set {KEY}=null"
    elif facts.cuda is False and given != CPU_METHOD:
        yield f"{KEY}={given}: needs GPUs: vLLM has no CPU kernels for it; set {KEY}={CPU_METHOD}"
    if facts.experts is False and given == EXPERTS_ONLY:
        yield f"{KEY}={given}: {config.model.path} has no experts, the only layers it quantizes; set {KEY}={CPU_METHOD}"
