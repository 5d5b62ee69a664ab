"""Whole networks beside their peers: verified, then timed in one process, in turns."""
