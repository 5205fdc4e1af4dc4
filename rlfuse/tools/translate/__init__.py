"""`rlfuse translate`: convert a command of verl, TRL or OpenRLHF to a job file."""
