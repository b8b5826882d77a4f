"""The gated delta rule of hybrid layers, and its gates."""
