"""Training: recipes, the loop, checkpoints, and what a run folder can do."""
