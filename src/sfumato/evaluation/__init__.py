"""What to measure on a set of images and texts, and for which truth."""
