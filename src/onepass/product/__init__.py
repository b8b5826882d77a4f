"""Linear layers as a prologue, which makes rows, and a product, which multiplies them."""
