"""onepass.fuse, horizontal fusion of a user's own code: find groups of operators, check them, rewrite the graph, report."""
