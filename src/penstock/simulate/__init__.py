"""Play a program over costs, without running it."""
