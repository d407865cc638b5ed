"""Training scripts made from a seed: a model, its cut, a schedule, and what is done step by step.

    seed ──► Case ──► the plain loop, in one process ─┐
                └───► a pipeline, over any ranks ─────┴─► compared after every move

``draws`` chooses, ``units`` and ``models`` are what models are made of, ``case`` draws a whole
script, ``trainers`` run it both ways, ``play`` compares. ``python -m tests.generated --help`` runs
many by hand; ``test_generated`` a few.
"""
