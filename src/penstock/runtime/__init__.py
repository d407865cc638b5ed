"""Play a program over stages."""
