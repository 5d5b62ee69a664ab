"""Training steps as plans: forward, loss, backward and optimiser in one run."""
