"""The scan of Mamba 2."""
