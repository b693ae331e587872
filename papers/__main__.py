"""`python -m papers ...` from a checkout: tables, figures and studies of the papers."""

from papers.commands import main

if __name__ == "__main__":
    main()
