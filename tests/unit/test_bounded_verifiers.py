"""The verifier that works in a process of its own, JSON schemas, and what bounds it."""

import json
import signal
import threading

import pytest

from rlfuse.rewards.sandbox import bounded
from rlfuse.rewards.sandbox.bare_python import SandboxError
from rlfuse.rewards.sandbox.bounded import BoundedFunction, Refused
from rlfuse.rewards.verifiers import json_schema

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string", "pattern": "^(a+)+$"}},
    "required": ["a"],
}


@pytest.mark.parametrize(
    ("answer", "right", "reason"),
    [
        ('{"a": 1}', 1, ""),
        ('Here:\n```json\n{"a": 1, "b": "aa"}\n```', 1, ""),
        ('{"a": "1"}', 0, "$.a: '1' is not of type 'integer'"),
        ("{}", 0, "'a' is a required property"),
        ("a: 1", 0, "no JSON"),
        ('{"a": NaN}', 0, "NaN is no JSON"),
        ("[" * 90_000, 0, "no JSON"),
        ('{"a": ' + "1" * 90_000 + "}", 0, "no JSON"),
        ('{"a": 1, "b": "' + "a" * 60 + '!"}', 0, "took longer than 0.3 s"),
    ],
)
def test_json_schema(answer, right, reason):
    result = json_schema.score("", answer, json.dumps(SCHEMA), timeout_s=60.0 if "took" not in reason else 0.3)
    assert result["score"] == right and reason in result.get("reason", "")
    assert result["format"] == (0.0 if "no JSON" in reason or "is no JSON" in reason else result["format"])


@pytest.mark.parametrize(
    "truth", ["{", "3", '{"type": "objct"}', {"$ref": "http://example.org/schema"}, {"a": {1}}, None]
)
def test_a_schema_that_is_none_is_an_error(truth):
    with pytest.raises(ValueError, match=r"ground_truth: got .*valid is a JSON schema"):
        json_schema.score("", "1", truth)


@pytest.mark.slow
def test_a_worker_serves_threads_in_turn_and_is_replaced_when_it_dies():
    worker = BoundedFunction("rlfuse.rewards.verifiers.json_schema_worker")
    found = []
    job = {"schema": "{}", "answers": ["1"]}
    threads = [threading.Thread(target=lambda: found.append(worker(job, 20.0))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [{"json": True, "problem": ""}] * 8
    worker._process.kill()
    worker._process.wait()
    assert worker(job, 20.0) == found[0]
    with pytest.raises(Refused, match="KeyError"):
        worker({}, 20.0)


@pytest.mark.slow
def test_a_worker_that_is_killed_or_stopped_from_outside_is_replaced_and_the_call_repeated(monkeypatch):
    worker, easy = BoundedFunction("rlfuse.rewards.verifiers.json_schema_worker"), {"schema": "{}", "answers": ["1"]}
    hard = {"schema": json.dumps(SCHEMA), "answers": [json.dumps({"b": "a" * 60 + "!", "a": 1})]}
    worker(easy, 20.0)
    threading.Timer(0.1, worker._process.kill).start()
    with pytest.raises(Refused, match=r"took longer than 0\.5 s"):
        worker(hard, 0.5)
    worker(easy, 20.0)
    monkeypatch.setattr(bounded, "BUSY_S", 4.0)
    (stopped := worker._process).send_signal(signal.SIGSTOP)
    assert worker(easy, 1.0) == {"json": True, "problem": ""}
    assert stopped.poll() == -signal.SIGKILL


def test_a_worker_that_cannot_start_is_no_verdict(monkeypatch):
    monkeypatch.setattr(bounded, "START_S", 20.0)
    with pytest.raises(SandboxError, match=r"did not start: .*no_such_module"):
        BoundedFunction("rlfuse.rewards.no_such_module")(1, 5.0)
