"""`rlfuse simulate`: fusion policies on a virtual clock."""
