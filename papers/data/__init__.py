"""Data that studies of the papers make and read: region features, and models that were released."""
