"""Fused pipeline schedules: which micro-batch of which model runs when on which device, and the search for it."""
