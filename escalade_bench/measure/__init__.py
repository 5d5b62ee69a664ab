"""Figures that can be trusted: results verified, the card's ceilings, and the records of them."""
