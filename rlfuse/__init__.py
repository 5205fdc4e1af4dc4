"""rlfuse: RLHF post-training whose generation, reward and training overlap sample by sample."""

import sys

if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
    del sys.path[0]  # the working folder, which would shadow installed modules; `rlfuse.train.run_command` appends it


def version_of(package: str) -> str | None:
    """The version of an installed package, by its metadata: nothing of it is imported. None where it is missing."""
    from importlib.metadata import PackageNotFoundError, version  # takes longer than all that is imported with this

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def __getattr__(name: str) -> str:
    """`__version__`, looked up when somebody asks: pyproject.toml says it, and from there the installed metadata."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return version_of(__name__) or "unknown"
