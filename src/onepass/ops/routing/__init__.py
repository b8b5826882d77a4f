"""Routing of tokens to the experts of a mixture."""
