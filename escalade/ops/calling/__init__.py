"""An operation called on tensors: registered with PyTorch, its chosen rung made ready once and run."""
