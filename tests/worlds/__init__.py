"""Simulated counterparts of what a test cannot start, one concept per file.

The controller on engines with random finishing times: `playing` (the world), `scenes` (its jobs), `random_engines`.
The same on a ledger of device memory: `resident_engines`. A cluster with faulty workers: `injected_faults`, and
`recorded_steps` from real runs. Profiles of training jobs: `training_traces`. CUDA graphs on a CPU: `emulated_graphs`.
"""
