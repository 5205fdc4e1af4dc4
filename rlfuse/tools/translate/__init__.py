"""`rlfuse translate`: a job file from a verl command line or YAML file."""
