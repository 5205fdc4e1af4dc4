"""What must not be written down: values of secret environment variables, keys, user names and passwords in addresses.

Role: `hidden` is applied to everything of a configuration that leaves the process (config.yaml, wandb, a submitted
job), `hidden_text` to what is said of it and of failures. Pure but for `os.environ`. Invariant: a value that stands in
the environment under a secret's name becomes `${oc.env:NAME}`, from which a configuration can be composed again.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from typing import Any

SECRET_NAME = re.compile(r"(^|[_-])(api_?key|access_?key|secret_?key|token|secret|passw(or)?d|credentials?)$", re.I)
SECRET_VARIABLE = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$")
USER = re.compile(r"(?<=://)[^/\s@\"']+@")
QUERY = re.compile(r"([?&](?:api_?key|key|token|access_token|secret|password)=)[^&\s\"']+", re.I)
GIVEN = re.compile(
    r"([\w.-]*(?:api_?key|access_?key|secret_?key|token|secret|passw(?:or)?d|credentials?)\s*[=:]\s*)"
    r"(?!\$\{)('[^']*'|\"[^\"]*\"|[^\s,}\]'\"]+)",
    re.I,
)
SHORTEST = 8
"""Shorter values are words that also stand elsewhere."""
HIDDEN = "***"


def hidden(value: Any, environment: Mapping[str, str] = os.environ) -> Any:
    """`value` (of dictionaries, lists, texts, ...) with its secrets hidden."""
    if isinstance(value, str):
        return hidden_text(value, environment)
    if isinstance(value, list | tuple):
        return [hidden(each, environment) for each in value]
    if isinstance(value, dict):
        return {key: _of_key(key, each, environment) for key, each in value.items()}
    return value


def hidden_text(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """`text` with its secrets hidden."""
    return QUERY.sub(rf"\1{HIDDEN}", USER.sub(f"{HIDDEN}@", by_name(text, environment)))


def hidden_command(text: str) -> str:
    """A command line with what is given to keys of a secret's name hidden too, within `{...}` as well."""
    return shlex.join(GIVEN.sub(rf"\1{HIDDEN}", word) for word in shlex.split(hidden_text(text)))


def by_name(value: Any, environment: Mapping[str, str] = os.environ) -> Any:
    """`value` with secret variables by their names: it can be composed again where these are set."""
    if isinstance(value, list | tuple):
        return [by_name(each, environment) for each in value]
    if isinstance(value, dict):
        return {key: by_name(each, environment) for key, each in value.items()}
    if isinstance(value, str):
        for name, secret in environment.items():
            if SECRET_VARIABLE.search(name) and len(secret) >= SHORTEST and secret in value:
                value = value.replace(secret, f"${{oc.env:{name}}}")
    return value


def _of_key(key: Any, value: Any, environment: Mapping[str, str]) -> Any:
    found = hidden(value, environment)
    if isinstance(found, str) and found and SECRET_NAME.search(str(key)) and not found.startswith("${oc.env:"):
        return HIDDEN
    return found
