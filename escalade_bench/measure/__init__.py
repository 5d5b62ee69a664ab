"""Ceilings of the card, records, and whether figures are current."""
