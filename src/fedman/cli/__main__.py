"""`python -m fedman.cli` is the `fedman` command."""

from fedman.cli import main

if __name__ == "__main__":
    main()
