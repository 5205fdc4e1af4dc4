"""`rlfuse translate`: convert a verl command line or YAML file to a job file."""
