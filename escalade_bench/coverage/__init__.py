"""Many networks, one after another: compiled or not, right or not, steps left to PyTorch, and speed."""
