WORKER_IMPORTS = "rlfuse.run.worker_imports"
"""Module with the imports of ranks and engines, for `cluster.fork_server`."""
