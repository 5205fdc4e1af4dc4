"""Run a function as another user in a forked process, as this user may have no access to the interpreter."""

import json
import os

import pytest

UID = 54321
"""User id without an entry in the user database."""
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="requires root")


def as_other_user(function, **variables):
    """Return the result of `function`, passed as JSON, run with these environment variables."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setresgid(UID, UID, UID)
            os.setresuid(UID, UID, UID)
            os.environ.update(variables)
            answer = {"result": function()}
        except BaseException as error:
            answer = {"error": repr(error)}
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        answer = json.load(file)
    os.waitpid(child, 0)
    assert "error" not in answer, answer["error"]
    return answer["result"]
