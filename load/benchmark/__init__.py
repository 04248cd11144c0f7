"""The benchmark: the same load on several servers, and what became of every request.

``python -m load.benchmark_request_lifecycle`` (also ``lifecycle bench``); docs/benchmark.md explains it. Data flows one
way: ``options`` → ``plan`` (cells, and each cell's requests) → ``run`` (``servers``, ``capacity``, ``drive`` with
``targets``) → ``records`` (a file for each cell) → ``figures`` → ``compare``, ``gate``, ``tables``, ``page``.
"""
