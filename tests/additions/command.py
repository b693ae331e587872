@command()
def peek(
    index: Annotated[Path, word("Folder of an index.", "INDEX")],
    n: Annotated[int, flag("Number of ids shown.", "-n", min=0)] = 3,
) -> None:
    """Show how many items an index has."""
    from sfumato.workflows.mine import peek

    print(json.dumps(peek(index, n)))
