@command()
def peek(
    index: Path = word(..., "Folder of an index.", "INDEX"), n: int = flag(3, "Number of ids shown.", "-n", min=0)
) -> None:
    """Show how many items an index has."""
    from sfumato.workflows.mine import peek

    print(json.dumps(peek(index, n)))
