"""`onepass bench`: measure every op against its peers, in one run, on this machine.

Each op has a case file (`bench/<op>.py`, named as in `onepass.ops`) that defines its cases, its peers and the exact formula. The
rest is shared: `model` defines what a case file fills in, and `registry` finds it. `runner` measures and `accuracy` checks.
`report`, `record` and `picture` show the results. `command` is what the command line calls.
"""
