"""What an op is tested with, ours or one added elsewhere: error budgets, poisoned memory, mutants, a repaired interpreter."""
