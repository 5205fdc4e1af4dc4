"""Helpers that `rlfuse.notebook` offers."""
