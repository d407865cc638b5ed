"""A model cut by the names of its modules, whose own forward every stage runs."""
