"""One op, one room: formula, reference, kernels, autograd, public function."""
