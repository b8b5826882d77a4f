"""What a call does with the machine: onepass.profile, onepass.compare and `onepass profile`.

record.py runs it under torch.profiler; trace.py reads what that wrote; costs.py knows the bytes and flops of an operator;
figures.py makes figures of it and words.py sentences; model.py holds them, table.py prints them, picture.py draws them.
"""
