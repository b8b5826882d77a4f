"""`onepass bench`: every op against its peers, in one run, on the machine at hand.

One file an op (`bench/<op>.py`, named as in `onepass.ops`) says which cases, which peers and what is exact; the rest is shared:
`model` what such a file fills in, `registry` finds it, `runner` measures, `accuracy` judges, `report`, `record` and `picture`
show it, `command` is what the command line calls.
"""
