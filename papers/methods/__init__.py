"""Methods of other papers as files of one's own: each registers itself when it is imported, nothing in src knows it."""
