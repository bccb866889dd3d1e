"""`holdfast`, recorded: `python -m chaos.launch worker chaos.tasks:app --processes 2`."""

from chaos import recorder
from holdfast.cli import main

if __name__ == "__main__":
    recorder.install()
    main()
