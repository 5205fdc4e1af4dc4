"""rlfuse: RLHF post-training whose generation, reward and training overlap sample by sample."""

__version__ = "0.1.0"
