"""`rlfuse simulate`: compare fusion policies on a virtual clock."""
