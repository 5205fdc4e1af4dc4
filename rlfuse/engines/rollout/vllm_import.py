"""vLLM, imported without what no engine here asks for: a quarter less CPU time until one has started, and 70 MiB.

Role: called in a process that will have an engine, before anything else there imports vLLM. Waits for nothing.
Invariant: what stays out is what vLLM goes without where it isn't installed, and stays out of vLLM's own imports alone.
"""

from __future__ import annotations

import os
import sys

AUDIO, COMPILER = "scipy.signal", "torch._inductor.lowering"


def import_vllm() -> None:
    """All that an engine's front end needs; the compiler with it unless that is off (`rollout_env`)."""
    unasked = [AUDIO, COMPILER] if os.environ.get("TORCHDYNAMO_DISABLE") == "1" else [AUDIO]
    hidden = [name for name in unasked if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # Python's own way to say that there is none
    try:
        import vllm.v1.engine.async_llm  # noqa: F401
    finally:
        for name in hidden:
            del sys.modules[name]
