"""`python -m fedman` is the `fedman` command."""

from fedman.cli import main

if __name__ == "__main__":
    main()
