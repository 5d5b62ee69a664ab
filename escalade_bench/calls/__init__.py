"""Host time of calling an operator, beside PyTorch's for the same."""
