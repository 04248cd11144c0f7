"""``python -m load.overhead``."""

from load.overhead.cli import app

if __name__ == "__main__":
    app(prog_name="python -m load.overhead")
