"""A head whose logits never exist whole: hidden @ weight.T, chunk by chunk, and what a loss of rows makes of them.

Files    row_loss.py says what a loss of rows is; steps.py makes registered ops of one, autograd.py a differentiable function;
         passes.py has the loops over chunks. They are made of operands.py, the products; chunks.py, the tokens of a chunk; and
         sums.py, the gradients over chunks. plan.py divides a call.
"""
