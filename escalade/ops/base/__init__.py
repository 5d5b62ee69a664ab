"""Building blocks of every operation.

A *problem* states what to compute, a *rung* is one way to compute it, a *config* holds a rung's compile-time choices, a
*ladder* lists the rungs of one operation, and the *card* describes the GPU they run on.
"""
