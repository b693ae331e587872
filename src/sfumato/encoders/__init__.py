"""Encoders of images and texts, which compute Gaussian embeddings."""
