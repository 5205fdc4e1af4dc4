"""`rlfuse schedule`: one fused pipeline schedule."""
