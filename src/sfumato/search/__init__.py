"""Search in Gaussian embeddings: exact ranking by blocks, lifted vectors for any engine, and an index on disk."""
