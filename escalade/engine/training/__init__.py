"""Training steps as plans: forward, loss, backward and optimizer in one run."""
