"""What goes wrong on a cluster, told in one message."""

import shutil
from collections import namedtuple

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from rlfuse.cluster import placement
from rlfuse.cluster.remote import explain
from rlfuse.engines.protocols import EngineError


def raised(error):
    try:
        raise error
    except type(error) as caught:
        return caught


def test_full_shared_memory_is_named_with_what_is_needed(monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(64 << 20, 60 << 20, 4 << 20))
    with pytest.raises(EngineError, match=r"/dev/shm has 4 MiB free.*256 MiB.*--shm-size"):
        placement._need_shared_memory()


def test_a_users_exception_keeps_its_type_message_and_place():
    cause = raised(ZeroDivisionError("division by zero"))
    text = str(explain(RayTaskError("f", "long Ray text", cause), "trainer/1", "update the actor", 5))
    assert text.startswith("trainer/1 failed to update the actor: ZeroDivisionError: division by zero")
    assert "test_cluster.py" in text and "long Ray text" not in text


def test_an_engine_error_from_a_worker_is_passed_on_as_it_is():
    cause = raised(EngineError("rollout/0: out of memory; lower rollout.max_num_seqs"))
    assert str(explain(RayTaskError("f", "tb", cause), "rollout/0", "generate", 5)) == str(cause)


@pytest.mark.parametrize(
    "error, words",
    [
        (ActorDiedError(), ["trainer/0 died", "load", "resume_mode=auto"]),
        (TimeoutError(), ["trainer/0 did not load within 5 s", "cluster.timeout_s"]),
        (OSError("disk on fire"), ["trainer/0 failed to load: OSError: disk on fire"]),
    ],
)
def test_each_way_to_fail_is_told_apart(error, words):
    explained = explain(error, "trainer/0", "load", 5)
    assert isinstance(explained, EngineError)
    assert all(word in str(explained) for word in words), str(explained)


def test_tensor_parallel_engines_on_gpus_get_their_bundles():
    slots = placement.Slots(group=None, count=4, device="cuda")
    options = slots.engine_options(2, 2, {"A": "1"})
    assert options["runtime_env"]["env_vars"]["VLLM_RAY_BUNDLE_INDICES"] == "2,3"
    assert options["num_gpus"] == 0
    assert slots.options(1, 0.5)["num_gpus"] == 0.5
