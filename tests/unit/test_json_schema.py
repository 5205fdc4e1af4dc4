"""JSON-schema verifier: scores of responses, invalid schemas, and time limits of validation."""

import json

import pytest

from rlfuse.rewards.verifiers import json_schema

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string", "pattern": "^(a|aa)+$"}},
    "required": ["a"],
    "patternProperties": {"^x": {"type": "integer"}, "^(a|aa)+b$": {}},
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("answer", "right", "reason"),
    [
        ('{"a": 1}', 1, ""),
        ('Here:\n```json\n{"a": 1, "b": "aa"}\n```', 1, ""),
        ('{"a": "1"}', 0, "$.a: '1' is not of type 'integer'"),
        ("{}", 0, "'a' is a required property"),
        ("a: 1", 0, "not valid JSON"),
        ('{"a": NaN}', 0, "NaN is not valid JSON"),
        ("[" * 90_000, 0, "not valid JSON"),
        ('{"a": ' + "1" * 90_000 + "}", 0, "not valid JSON"),
        ('{"a": 1, "b": "' + "a" * 60 + '!"}', 0, "took longer than 0.3 s"),
        ('{"a": 1, "' + "a" * 60 + '!": 2}', 0, "took longer than 0.3 s"),
        ('{"a": 1, "xyz": 2}', 1, ""),
        ('{"a": 1, "xyz": "2"}', 0, "$.xyz: '2' is not of type 'integer'"),
        ('{"a": 1, "c": 2}', 0, "$: the property 'c' is not allowed"),
    ],
)
def test_json_schema(answer, right, reason):
    result = json_schema.score("", answer, json.dumps(SCHEMA), timeout_s=5.0 if "took" not in reason else 0.3)
    assert result["score"] == right and reason in result.get("reason", "")
    assert result["format"] == (0.0 if "no JSON" in reason or "not valid JSON" in reason else result["format"])


NESTED = {"type": "array", "items": {"$ref": "#"}}


@pytest.mark.parametrize(
    "schema, answer",
    [
        ({"unevaluatedProperties": False, "patternProperties": {r"^(\w+\s?)*$": {}}}, json.dumps({"a" * 40 + "!": 1})),
        ({"anyOf": [NESTED, NESTED | {"maxItems": 9}]}, "[" * 30 + "1" + "]" * 30),
    ],
    ids=["pattern", "recursion"],
)
def test_validation_has_a_time_limit(schema, answer):
    result = json_schema.score("", answer, schema, timeout_s=0.3)
    assert result["score"] == 0 and "took longer than 0.3 s" in result["reason"]


@pytest.mark.parametrize(
    "truth", ["{", "3", '{"type": "objct"}', {"$ref": "http://example.org/schema"}, {"a": {1}}, None, {"pattern": "("}]
)
def test_invalid_schema_is_an_error(truth):
    with pytest.raises(ValueError, match=r"ground_truth: got .*must be a JSON schema"):
        json_schema.score("", '"1"', truth)
