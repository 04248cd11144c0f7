"""``python -m load.benchmark_request_lifecycle``: what becomes of requests under load; see docs/benchmark.md."""

from load.benchmark.cli import app

if __name__ == "__main__":
    app(prog_name="python -m load.benchmark_request_lifecycle")
