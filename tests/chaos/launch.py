"""`holdfast`, recorded: `python -m tests.chaos.launch worker tests.chaos.tasks:app --processes 2`."""

from holdfast.cli import main
from tests.chaos import recorded

if __name__ == "__main__":
    recorded.install()
    main()
