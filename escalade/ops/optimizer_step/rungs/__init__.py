"""The rungs of optimizer_step, a module a family."""
