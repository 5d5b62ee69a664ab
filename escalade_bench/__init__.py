"""Measuring: verified before it is timed, every subject in one process, beside the card's own ceilings."""
