"""Encoders: from pictures and texts to Gaussian embeddings."""
