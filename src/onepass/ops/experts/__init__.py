"""The experts of a mixture: what tokens go through that a router has sent to them."""
