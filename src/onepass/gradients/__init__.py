"""Where gradients go: main_grad, from the op that computes one to the optimizer that reads it."""
