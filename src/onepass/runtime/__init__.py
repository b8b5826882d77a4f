"""How an op reaches the hardware: backend choice, launch, dispatch, saved tensors, validation."""
