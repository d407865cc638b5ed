"""The `penstock` command: plan, look at and check schedules without a GPU, and without torch."""
