"""Tuning: verification and timing of rungs and configs, random sweeps, and evaluation of the cost models."""
