"""rlfuse: RLHF post-training that overlaps generation, reward and training sample by sample."""

import sys

if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
    del sys.path[0]  # the working folder, which would shadow installed modules; `rlfuse.train.run_command` appends it


def version_of(package: str) -> str | None:
    """Return the version of an installed package without importing it; None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # slower to import than this whole module

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def __getattr__(name: str) -> str:
    """Look up `__version__` lazily in the installed metadata."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return version_of(__name__) or "unknown"
