"""Execution of a program over stages."""
