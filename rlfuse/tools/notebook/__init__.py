"""Implementation of `rlfuse.notebook`."""
