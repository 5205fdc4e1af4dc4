"""Commands beside `rlfuse train`: loaded by `rlfuse.cli` and `rlfuse.notebook`, imported by nothing else."""
