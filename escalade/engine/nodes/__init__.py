"""The graph operators: how each is recognised, computed and lowered to an operation of Escalade's."""
