"""Evaluate and use models without training: `rlfuse eval`, `rlfuse generate`, `rlfuse reward replay`, `rlfuse push`."""
