"""The studies of the papers on any model: toy data, corruption, image sets, words, maps, crops and zero-shot."""
