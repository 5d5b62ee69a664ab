"""Many networks, one after another: which of them compile, are right, stay out of PyTorch, and are fast."""
