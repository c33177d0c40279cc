"""``python -m fewstep``: the program, where a launcher such as torchrun names modules."""

from fewstep.cli import main

if __name__ == "__main__":
    main()
