"""Tools to test any op, also one from outside of onepass: error budgets, poisoned memory, mutants, a repaired interpreter."""
