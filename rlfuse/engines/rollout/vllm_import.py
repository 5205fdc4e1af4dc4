"""vLLM, on CPU hosts imported without what no engine asks for there: a quarter less CPU time until one has started,
and 70 MiB.

Role: called in a process that will have an engine, before anything else there imports vLLM. Waits for nothing.
Invariant: what stays out is what vLLM goes without where it isn't installed, and stays out of vLLM's own imports alone.
"""

from __future__ import annotations

import os
import sys

UNASKED = ("scipy.signal", "torch._inductor.lowering")
"""Of audio, and of the compiler, which is off on CPU hosts (`rollout_env`)."""


def import_vllm() -> None:
    """All that an engine's front end needs."""
    without = UNASKED if os.environ.get("TORCHDYNAMO_DISABLE") == "1" else ()
    hidden = [name for name in without if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # Python's own way to say that there is none
    try:
        import vllm.v1.engine.async_llm  # noqa: F401
    finally:
        for name in hidden:
            del sys.modules[name]
