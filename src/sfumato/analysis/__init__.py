"""The studies of the papers on any model: corruption against uncertainty, set algebra of pictures, words, a map, and crops."""
