"""Models measured and used without training: `rlfuse eval`, `rlfuse generate`, `rlfuse reward replay`."""
