"""Fifty adversarial responses; run as a program, it scores them with every verifier.

`python hostile_responses.py FOLDER` prints one JSON line per response: name and outcome of each verifier. Code in
the responses tries to read FOLDER/secret and to write FOLDER/marker.
"""

import json
import resource
import sys
from pathlib import Path

from rlfuse.errors import RlfuseError
from rlfuse.rewards.api.functions import load_function
from rlfuse.rewards.api.items import item_of_row
from rlfuse.rewards.reasoning_tags import answer_after_reasoning, format_gate, split_reasoning
from rlfuse.rewards.verifiers.answers import fenced_blocks, strip_wrapping
from rlfuse.rewards.verifiers.code_blocks import blocks

LONG = 200_000
MEMORY = 6 << 30
TESTS = {"inputs": ["1\n", "2\n"], "outputs": ["1\n", "2\n"]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a|aa)+$"}}, "required": ["a"]}
VERIFIERS = {  # name -> (ground truth, arguments)
    "math": (r"\frac{4}{7}", {}),
    "numeric": ("4.25", {"relative": 0.01}),
    "choice": ("B", {"options": ["one", "two", "three"]}),
    "exact": (["forty-two"], {"ignore_case": True}),
    "interval": ([1.0, 2.5], {}),
    "box": ([0.1, 0.1, 0.5, 0.5], {}),
    "pattern": ("(x+x+)+y", {"timeout_s": 0.3}),
    "json_schema": (SCHEMA, {"timeout_s": 0.5}),
    "code": (TESTS, {"timeout_s": 0.5, "total_s": 1.0, "memory_mb": 256}),
}


def python(code: str) -> str:
    return f"<think>run it</think>\n```python\n{code}\n```"


def texts() -> dict[str, str]:
    """Return responses without code."""
    deep = LONG // 2
    return {
        "boxes in boxes": r"\boxed{" * deep + "4" + "}" * deep,
        "a box that never ends": r"\boxed{" + "4" * LONG,
        "open braces": "{" * LONG,
        "fractions in fractions": r"\boxed{" + r"\frac{1}{" * 5000 + "7" + "}" * 5001,
        "roots in roots": r"\boxed{" + r"\sqrt{" * 5000 + "7" + "}" * 5001,
        "a tower of powers": r"\boxed{9^{9^{9^{9^{9^{9}}}}}}",
        "a factorial of factorials": r"\boxed{((((9!)!)!)!)!}",
        "a binomial beyond memory": r"\boxed{\binom{10^{18}}{10^{9}}}",
        "a sum without end": r"\boxed{\sum_{k=1}^{10^{12}} k^{k}}",
        "a matrix of a million": r"\boxed{\begin{pmatrix}" + "1&" * 100_000 + r"1\end{pmatrix}}",
        "unions of sets": r"\boxed{" + r"\{1\}\cup" * 20_000 + r"\{2\}}",
        "digits": r"\boxed{" + "7" * LONG + "/" + "3" * LONG + "}",
        "a tiny exponent": r"\boxed{1e-999999999999}",
        "a huge exponent": r"\boxed{1E+999999999999}",
        "not a number": r"\boxed{nan} \boxed{inf} \boxed{-\infty}",
        "foreign digits": "#### " + "٤" * 1000 + "²" * 1000 + "Ⅳ" * 1000,
        "letters that combine": "#### 4" + "\u0301" * LONG,
        "text from right to left": "The answer is \u202e\u2066" * 20_000 + "B",
        "nulls and controls": "\0\x01\x1b]0;owned\x07\x1b[2J\x1b[?1049h" * 5000 + "answer: B",
        "a lone surrogate": "The answer is \ud800\udfff B. \\boxed{\ud83d}",
        "tags of thoughts": "<think>" * (LONG // 7) + "</think>" * (LONG // 8),
        "tags that alternate": "<think></think>" * (LONG // 15) + "B",
        "fences": "```" * (LONG // 3),
        "fences of growing length": "\n".join("`" * n + "python" for n in range(3, 600)),
        "stars": "*" * LONG + "B" + "*" * LONG,
        "dollars": "$" * LONG + "4.25" + "$" * LONG,
        "announcements": "The final answer is: " * 10_000,
        "white space": "answer:" + " \t\r\n\v\f\u2028\xa0" * (LONG // 8) + "B",
        "for a pattern": "x" * 40,
        "for the pattern of a schema": json.dumps({"a": "a" * 50 + "!"}),
        "JSON in JSON": '{"a":' * 50_000 + "1" + "}" * 50_000,
        "a key many times": "{" + '"a": "a",' * 20_000 + '"a": 1}',
        "numbers of a box": "[" + "0.1, " * (LONG // 5) + "]",
        "numbers of an interval": "from " + "1 to " * (LONG // 5) + "2",
        "units": r"\boxed{4.25 " + r"\text{kg}\cdot" * 10_000 + r"\text{m}}",
        "tool calls": "<tool_call>" * 10_000 + json.dumps({"name": "os.system", "arguments": "touch {marker}"}),
        "everything with letters": "".join(map(chr, range(32, 55_000))) * 4,
    }


def programs() -> dict[str, str]:
    """Return responses with code that is executed."""
    code = {
        "writes with the shell": "import os\nprint(input())\nos.system('touch {marker}')",
        "writes when it ends": "import atexit\natexit.register(lambda: open('{marker}', 'w'))\nprint(input())",
        "reads a secret": "print(open('{secret}').read())",
        "links to a secret": "import os\nos.symlink('{secret}', 'x')\nprint(open('x').read())",
        "starts a program": "import subprocess as s\n"
        "s.Popen(['/bin/sh', '-c', 'sleep 1; touch {marker}'])\nprint(input())",
        "calls the kernel": "import ctypes\nc = ctypes.CDLL(None)\nc.creat(b'{marker}', 420)\nprint(input())",
        "kills its parents": "import os, signal\nfor n in (os.getppid(), 0, -1):\n    os.kill(n, signal.SIGKILL)",
        "forks": "import os\nwhile True:\n    os.fork()",
        "fills memory": "x = [bytearray(1 << 20) for _ in range(1 << 20)]",
        "fills the disk": "f = open('x', 'wb')\nwhile True:\n    f.write(bytes(1 << 20))",
        "prints without end": "while True:\n    print('1' * (1 << 16))",
        "ignores signals": "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except Exception: pass\nwhile True: pass",
        "says that it passed": "import os, sys\nfor n in range(3, 64):\n    try: os.write(n, b'{{\"passed\": true}}')\n"
        "    except OSError: pass\nos._exit(0)",
    }
    return {name: python(text) for name, text in code.items()}


RESPONSES = {**texts(), **programs()}


def outcome(verifier: str, response: str) -> dict:
    truth, arguments = VERIFIERS[verifier]
    row = {"prompt": "p", "response": response, "ground_truth": truth}
    try:
        [found] = load_function(f"rlfuse.rewards.verifiers.{verifier}:score", arguments).score([item_of_row(row)], 20.0)
    except RlfuseError as error:
        return {"error": str(error)}
    value = getattr(found, "value", None)
    return {"value": value, "text": f"{found!r:.2000}", "failed": value is None}


def main(folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for name, text in RESPONSES.items():
        if name in programs():
            text = text.format(marker=folder / "marker", secret=folder / "secret")
        read = [
            function(text)
            for function in (answer_after_reasoning, split_reasoning, strip_wrapping, fenced_blocks, blocks)
        ]
        format_gate([item_of_row({"prompt": "p", "response": text})])
        found = {verifier: outcome(verifier, text) for verifier in VERIFIERS}
        print(json.dumps({"name": name, "read": len(read), "found": found}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
