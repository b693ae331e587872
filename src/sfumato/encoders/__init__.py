"""Encoders: from images and texts to Gaussian embeddings."""
