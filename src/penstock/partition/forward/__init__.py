"""Cut a model by module names; every stage runs the model's own forward."""
