"""Figures that can be trusted: results verified, times taken, the card's ceilings, and the records of them."""
