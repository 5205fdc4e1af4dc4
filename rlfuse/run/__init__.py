WORKER_IMPORTS = "rlfuse.run.worker_imports"
"""The module that imports what ranks and engines need, for `cluster.fork_server`."""
