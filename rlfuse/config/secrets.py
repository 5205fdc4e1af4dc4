"""Redact secrets in everything that is written or shown: by key name, by value, and by pattern.

A value is secret if an environment variable with a secret's name has it, if `remember` received it under such a name,
or if it looks like a key, an Authorization header or credentials in a URL. Values of environment variables become
`${oc.env:NAME}`, which Hydra resolves again.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

OWNERS = (
    "access account anthropic api auth aws azure client cohere deepseek deploy encryption fireworks gcp gemini google "
    "groq hf hugging_?face judge license master mistral openai openrouter private secret service signing ssh together "
    "wandb xai"
)
WORDS = (
    rf"(?:{'|'.join(OWNERS.split())})[_-]?key(?:[_-]?id)?|(?<!eos.)(?<!bos.)(?<!pad.)(?<!unk.)(?<!image.)(?<!video.)"
    r"(?<!stop.)(?<!mask.)token|secret|passw(?:or)?d|passphrase|(?<=[_-])pass|(?<=[_-])pwd|credentials?|authorization"
)
SECRET_NAME = re.compile(rf"(?:^|[^a-zA-Z0-9]|(?<=[a-z0-9])(?=[A-Z]))(?i:{WORDS}|pass|pwd|auth|cookie)$")
SECRET_VARIABLE = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|(^|_)(PASS|AUTH)|_PWD)$", re.I)
USER = re.compile(r"(?<=://)[^/\s@\"']+@")
QUERY = re.compile(rf"([?&#;](?:[\w.-]*(?:{WORDS}|signature|[_-]sig)|key|sig|auth|pass|pwd)=)[^&\s\"']+", re.I)
QUOTED = r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\""
NAMED = rf"((?<![a-zA-Z0-9])(?:{WORDS})[\"']?\s*[=:]\s*)(?!\$\{{)"
GIVEN = re.compile(rf"{NAMED}({QUOTED}|[^\s,}}\]'\"]+)", re.I)
QUOTING = re.compile(rf"{NAMED}({QUOTED}|(?=[^\s,]{{0,200}}\d)[^\s,}}\]'\"()]{{8,}})", re.I)
"""Pattern for messages and tracebacks, where code may follow a name."""
AUTHORIZATION = re.compile(r"(\bauthorization[\"']?\s*[=:]\s*[\"']?)(?!\$\{)[^\n\"']+", re.I)
FORMS = re.compile(
    r"(?<=Bearer )(?=\S{0,200}\d)[\w.~+/=-]{8,}"
    r"|\b(?:sk-|hf_|gh[opsur]_|github_pat_|glpat-|xox[abprs]-|AKIA|AIza)(?=[\w-]{0,200}\d)[\w-]{16,}"
    r"|\beyJ[\w-]{8,500}\.[\w-]{8,2000}\.[\w-]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)
SHORTEST = 8
HIDDEN = "***"
_remembered: set[str] = set()


def remember(value: Any) -> None:
    """Register the secrets of a configuration, to redact them by value in messages without their names."""
    if isinstance(value, list | tuple):
        for each in value:
            remember(each)
    elif isinstance(value, dict):
        for key, each in value.items():
            remember(each)
            if SECRET_NAME.search(str(key)):
                _remembered.update(text for text in _texts(each) if len(text) >= SHORTEST)
    elif isinstance(value, str):
        for found in USER.findall(value):
            _, _, password = found.removesuffix("@").partition(":")
            _remembered.update(text for text in (password, unquote(password)) if len(text) >= SHORTEST)


def hidden(value: Any, environment: Mapping[str, str] = os.environ) -> Any:
    """Return `value` (dictionaries, lists, strings, ...) with its secrets redacted."""
    if isinstance(value, str):
        return _hidden_values(value, environment)
    if isinstance(value, list | tuple):
        return [hidden(each, environment) for each in value]
    if isinstance(value, dict):
        return {
            key: _redacted(each, environment) if SECRET_NAME.search(str(key)) else hidden(each, environment)
            for key, each in value.items()
        }
    return value


def hidden_text(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return a message with its secrets redacted, including those quoted with their names: `api_key='...'`."""
    return QUOTING.sub(rf"\1{HIDDEN}", _hidden_values(text, environment))


def hidden_command(text: str) -> str:
    """Return a command line with its secrets redacted."""
    return shlex.join(GIVEN.sub(rf"\1{HIDDEN}", word) for word in shlex.split(_hidden_values(text, os.environ)))


def by_name(value: Any, environment: Mapping[str, str] = os.environ) -> Any:
    """Return `value` with secrets replaced by `${oc.env:NAME}`, which resolves where these variables are set."""
    if isinstance(value, list | tuple):
        return [by_name(each, environment) for each in value]
    if isinstance(value, dict):
        return {key: by_name(each, environment) for key, each in value.items()}
    if isinstance(value, str):
        secrets = ((secret, name) for name, secret in environment.items() if SECRET_VARIABLE.search(name))
        for secret, name in sorted(secrets, key=lambda each: -len(each[0])):  # one may be a part of another
            if len(secret) >= SHORTEST:
                value = value.replace(secret, f"${{oc.env:{name}}}")
    return value


def _hidden_values(text: str, environment: Mapping[str, str]) -> str:
    text = by_name(text, environment)
    for secret in sorted(_remembered, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    text = FORMS.sub(HIDDEN, AUTHORIZATION.sub(rf"\1{HIDDEN}", text))
    return QUERY.sub(rf"\1{HIDDEN}", USER.sub(f"{HIDDEN}@", text))


def _redacted(value: Any, environment: Mapping[str, str]) -> Any:
    if isinstance(value, list | tuple):
        return [_redacted(each, environment) for each in value]
    if isinstance(value, dict):
        return {key: _redacted(each, environment) for key, each in value.items()}
    if isinstance(value, str):
        found = by_name(value, environment)
        return found if not found or found.startswith("${oc.env:") else HIDDEN
    return HIDDEN if isinstance(value, int) and len(str(value)) >= SHORTEST else value


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [text for each in value for text in _texts(each)]
    return [str(value)] if isinstance(value, str | int) else []
