"""Data: pairs of images and texts, where they come from, and what was wrong with them."""
