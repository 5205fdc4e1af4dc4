"""The Python API: the functions and classes that `rlfuse` exports."""
