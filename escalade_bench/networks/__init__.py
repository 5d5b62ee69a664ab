"""Whole networks and their peers: verified, then timed in one process, interleaved."""
