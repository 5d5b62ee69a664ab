"""Measuring: verified before it is timed, every arm in one process, beside the card's own ceilings."""
