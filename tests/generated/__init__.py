"""Training scripts made from a seed: a model, its cut, a schedule, and what is done step by step.

    seed ──► Case ──► the plain loop, in one process ─┐
                └───► a pipeline, over any ranks ─────┴─► compared after every move

``units`` and ``models`` are what models are made of, ``plans`` how they lie on ranks, ``habits``
what is done with gradients, ``moves`` what a script does in turn; ``drawing``, ``recipes`` and
``scripts`` choose of these. ``plain`` and ``piped`` run it, ``play`` compares. ``python -m
tests.generated --help`` runs many by hand; ``test_generated`` a few.

Left out, as there is nothing exact to compare with: steps in the backward under DDP (its hooks see
gradients before they are reduced), failures among replicas (whose groups do not outlive them), and
the microbatch of a failure where forwards are recomputed or reordered.
"""
