"""What our way through Triton costs: against the bare engine, in CPU time, and at a rate no engine here reaches.

Run it with ``make overhead``, ``lifecycle bench overhead`` or ``python -m load.overhead``.
Three parts, each from one run:

``engine``
    Bare ``AsyncLLM``, ours over gRPC and ours over HTTP at several numbers of concurrent requests, in rounds A B C A B
    C …: machines drift, so only figures of the same round are compared, and the spread over rounds is shown.
``cpu``
    CPU time of tritonserver and of the stub (not of vLLM's processes) per streamed token.
``simulated``
    The simulated engine at a rate far above a CPU's: how many tokens arrive complete and in order, and in how many
    responses.

The load comes from processes of their own (``child``), so that its CPU time is seen apart. Bare ``AsyncLLM`` is
consumed in the process that holds it, which is how one uses it, and it is handed token ids ready made: the leanest use
there is, so every doubt counts against us.

Both engines stay loaded and take turns. The idle one is not stopped with SIGSTOP: a stopped tritonserver wakes up to
time-outs and missed heartbeats, and the next figures would show that. Nor need it be: vLLM's worker spins for a second
after its last step and then sleeps; each measurement waits until the other engine sleeps, and the report shows the
CPU share it had then.
"""
