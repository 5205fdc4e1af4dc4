"""Jobs that tests drive, one after the other in one process and on the same engines (`kept_engines`).

Run by driven_job.py as a process of its own. Each line of its input names a script, whose `perform(words)` runs a job
of the settings `words` and returns what it found, and the file that gets this, or the traceback of what it raised.
"""

import importlib
import json
import sys
import traceback
from pathlib import Path
from unittest import mock


def main():
    """Until the input ends."""
    # Not above: each worker that decodes clips imports this file anew, as multiprocessing spawns it.
    import kept_engines
    from ray import cloudpickle

    from rlfuse.files import write_atomically
    from rlfuse.run import build as running

    cloudpickle.register_pickle_by_value(kept_engines)  # workers need not import it with all that it imports
    with kept_engines.kept() as engines:
        for line in sys.stdin:
            script, out, words = json.loads(line)
            answer = {"found": None, "failed": None}
            try:
                module = importlib.import_module(script)
                cloudpickle.register_pickle_by_value(module)
                with mock.patch.object(
                    running, "build_controller", running.build_controller
                ):  # a script may have its own
                    answer["found"] = module.perform(words)
            except BaseException:
                answer["failed"] = traceback.format_exc()
                engines.end()
            write_atomically(Path(out), json.dumps(answer))


if __name__ == "__main__":
    main()
