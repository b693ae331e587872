"""One file a verb: what a command does, without its options and its printing."""
