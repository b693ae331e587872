"""sfumato: image-text search and matching that knows what it does not know."""
