"""`python -m rlfuse.train key=value ...`, also `rlfuse train`: runs `rlfuse.application`.

Imported, this module replaces itself by the function `rlfuse.train`, because Python binds an imported module to the
attribute of its package that has the same name.
"""

import sys

if __name__ == "__main__":
    from rlfuse.application import main

    sys.exit(main())
elif __name__ == "rlfuse.train":  # otherwise a process that multiprocessing spawned
    from rlfuse.api.commands import train

    sys.modules[__name__] = train  # type: ignore[assignment]
