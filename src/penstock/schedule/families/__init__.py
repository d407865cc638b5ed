"""The families of schedules, one file each: pure functions that return a Program."""
