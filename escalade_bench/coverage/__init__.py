"""Coverage of many networks: captured or not, correct or not, steps left to PyTorch, and speed."""
