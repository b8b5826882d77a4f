"""Profile a call: onepass.profile, onepass.compare and `onepass profile`.

record.py runs the call under torch.profiler; script.py and recorders.py run and record a script. trace.py parses the Chrome
trace; timeline.py names and groups its events. costs.py counts an operator's bytes and flops; limits.py measures the machine's
ceilings. figures.py computes a step's figures; verdict.py and suggestions.py write the sentences. model.py holds the results
and prints them, picture.py draws them.
"""
