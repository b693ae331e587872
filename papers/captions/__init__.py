"""A caption metric: the probability that a person would say that a text describes an item. See :mod:`.score`."""
