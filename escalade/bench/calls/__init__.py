"""What a call of an operator costs the thread that makes it, beside PyTorch's for the same."""
