"""Pipeline-parallel training: stages of Hugging Face models on devices, and an executor for pipeline schedules."""
