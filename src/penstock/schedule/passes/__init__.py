"""Pure functions from Program to Program, named by what they do."""
