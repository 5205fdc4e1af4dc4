"""Runs jobs of the tests one after the other in one process and on the same engines (`kept_engines`).

Started by driven_job.py as a separate process. Each line of its input names a script, whose `perform(words)` runs a job
with the settings `words` and returns its result, and the file that receives this result or the traceback.
"""

import importlib
import json
import sys
import traceback
from pathlib import Path
from unittest import mock


def main():
    """Run one job per line of the input."""
    # Not at the top: each spawned decode worker imports this file again.
    import kept_engines
    from ray import cloudpickle

    from rlfuse.files import write_atomically
    from rlfuse.run import build as running

    cloudpickle.register_pickle_by_value(kept_engines)  # workers cannot import it
    with kept_engines.kept() as engines:
        for line in sys.stdin:
            script, out, words = json.loads(line)
            answer = {"found": None, "failed": None}
            try:
                module = importlib.import_module(script)
                cloudpickle.register_pickle_by_value(module)
                with mock.patch.object(running, "build_controller", running.build_controller):  # scripts may replace it
                    answer["found"] = module.perform(words)
            except BaseException:
                answer["failed"] = traceback.format_exc()
                engines.end()
            write_atomically(Path(out), json.dumps(answer))


if __name__ == "__main__":
    main()
