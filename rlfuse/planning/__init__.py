"""What a job would take, before it is started: sizes, memory and time, as pure functions of plain data."""
