"""What a model that trains holds on its device for gradients, and what is left there when it gives the device up.

Role: the memory plan and the replay of moves read this; it imports neither torch nor DeepSpeed. `copies` are the ranks
that hold the same parameters: all of them, or with pipelines one of each.

    on the device, bytes a parameter, bfloat16            ZeRO 0     1             2             3
    parameters                                              2        2             2         2 / copies
    gradients, summed in float32, from the first
      backward to the step (`gradient_bytes`)               4        4        4 / copies     4 / copies, always
    masters and moments (none with offload_optimizer)      12    12 / copies   12 / copies   12 / copies
    after `trainer.offloading.to_host`: nothing of all that, trained or frozen, under any stage
"""

REDUCED = 50_000_000
"""Gradient elements that are reduced at a time; DeepSpeed's own 500 million would take 2 GB in float32."""
KEPT = 32 << 20
"""Bytes of a tensor up to which a rank on CPUs keeps its memory for the next one (`rank_group.HOST_MEMORY`)."""
_ITEM = {"float32": 4, "bfloat16": 2}


def gradient_bytes(zero_stage: int, dtype: str, accum: str, copies: int) -> float:
    """Bytes a parameter of the gradients that wait for a step, for `model.dtype` and `actor.grad_accum_dtype`.

    What is reduced at a time comes on top, and in the step itself, under ZeRO 1 to 3, the share that the optimizer
    reads: 4 / copies. Float32 weights have float32 gradients, whatever `accum` is.
    """
    return max(_ITEM[dtype], _ITEM[accum]) / (copies if zero_stage > 1 else 1)
