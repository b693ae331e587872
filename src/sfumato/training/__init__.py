"""Training of models: the loop, its batches, optimisers and checkpoints."""
