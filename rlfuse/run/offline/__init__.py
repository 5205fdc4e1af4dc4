"""Tasks that train on a fixed dataset (`trainer.task` other than rl): one loop, and a definition per task."""
