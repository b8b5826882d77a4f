"""`onepass bench`: measure every op against its peers, in one run, on this machine.

Each op has a case file (`bench/<op>.py`, named as in `onepass.ops`): shapes, inputs, options, peers, and the bytes that must be
moved. `define` makes a benchmark of it and of the op's record, and `registry` finds it. `runner` measures and `accuracy` checks.
`report`, `record` and `picture` show the results. `command` is what the command line calls.
"""
