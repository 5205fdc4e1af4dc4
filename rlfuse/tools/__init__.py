"""Commands other than `rlfuse train`, imported only by `rlfuse.cli` and `rlfuse.notebook`."""
