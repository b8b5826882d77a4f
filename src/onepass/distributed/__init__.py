"""Collectives, and how tensor-parallel ranks divide a product and a vocabulary. Process groups are arguments."""
