"""Verifiers that work in a process of their own, mathematics and JSON schemas, and what bounds them."""

import json
import threading

import pytest

from rlfuse.rewards.sandbox import bounded
from rlfuse.rewards.sandbox.bare_python import SandboxError
from rlfuse.rewards.sandbox.bounded import BoundedFunction, Refused
from rlfuse.rewards.verifiers import json_schema
from rlfuse.rewards.verifiers import math as symbolic

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string", "pattern": "^(a+)+$"}},
    "required": ["a"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        (r"\boxed{\frac12}", "0.5", 1),
        ("So the answer is $x^2+2x+1$.", "(x+1)^2", 1),
        ("2*sqrt(3)", r"\sqrt{12}", 1),
        ("x**2", "$x^2$", 1),
        ("π/2", r"\frac{\pi}{2}", 1),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1),
        ("[1, 2)", "[1,2)", 1),
        ("[1, 2]", "[1,2)", 0),
        ("x = 3", "3", 1),
        ("−3", "-3", 1),  # noqa: RUF001 U+2212
        ("50%", "0.5", 1),
        ("0.5", r"50\%", 1),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", 1),
        ("3", 4, 0),
        ("<think>4</think>3", 4, 0),
        ("", "3", 0),
        ("no idea", "3", 0),
        ("__import__('os').system('true')", "3", 0),
    ],
)
def test_math(answer, truth, right):
    pytest.importorskip("math_verify")
    result = symbolic.score("", answer, truth)
    assert result["score"] == right and ("reason" in result) != bool(right)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("9**9**9", "too large"),
        ("9^{9^{9}}", "too large"),
        ("2^{99999}", "too large"),
        ("99999!", "too large"),
        ("3!!!", "too large"),
        ("7" * 80, "too large"),
        ("7" * 1_000_000, "longer than"),
        (r"\boxed{" + "7" * 50_000 + "}", "500 at most"),
        ("(" * 100 + "x" + ")" * 100, "nested 100 deep"),
        (r"\frac{1}{" * 13 + "2" + "}" * 13, "nested 13 deep"),
    ],
)
def test_hostile_expressions_are_refused_without_being_looked_at(answer, reason, monkeypatch):
    monkeypatch.setattr(symbolic, "_parses", lambda latex, seconds: "")
    monkeypatch.setattr(symbolic, "_worker", None)
    result = symbolic.score("", answer, "1")
    assert (result["score"], result["format"]) == (0.0, 0.0) and reason in result["reason"]


@pytest.mark.slow
def test_math_that_takes_for_ever_is_stopped_and_the_next_goes_on():
    pytest.importorskip("math_verify")
    assert symbolic.score("", "1", "1")["score"] == 1.0
    slow = symbolic.score("", "(x+1)^{999}(y+1)^{999}", "3", timeout_s=0.5)
    assert slow["score"] == 0.0 and "took longer than 0.5 s" in slow["reason"]
    assert symbolic.score("", "1", "1")["score"] == 1.0


@pytest.mark.parametrize("truth", ["]]", "", "9^{9^9}", None])
def test_a_truth_that_is_no_expression_is_an_error(truth):
    pytest.importorskip("math_verify")
    with pytest.raises(ValueError, match=r"ground_truth: got .*valid is an expression"):
        symbolic.score("", "1", truth)


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
    result = json_schema.score("", answer, json.dumps(SCHEMA), timeout_s=5.0 if "took" not in reason else 0.3)
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
    job = {"schema": "{}", "answer": "1"}
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


def test_a_worker_that_cannot_start_is_no_verdict(monkeypatch):
    monkeypatch.setattr(bounded, "START_S", 20.0)
    with pytest.raises(SandboxError, match=r"did not start: .*no_such_module"):
        BoundedFunction("rlfuse.rewards.no_such_module")(1, 5.0)
