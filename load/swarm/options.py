"""Our options on Locust's command line, in its configuration file and on its web page."""

from __future__ import annotations

from typing import Any


class _Group:
    """A group of options that are on the web page too, which Locust does for those without a group only."""

    def __init__(self, parser: Any, title: str) -> None:  # noqa: ANN401
        self._group = parser.add_argument_group(title)

    def add(self, *names: str, **rules: Any) -> None:  # noqa: ANN401
        """Add one option."""
        action = self._group.add_argument(*names, **rules)
        action.include_in_web_ui = True
        action.is_secret = action.is_required = action.is_multiple = False


def add_options(parser: Any) -> None:  # noqa: ANN401 - Locust's
    """Add ours to Locust's; each says what it is for and what to begin with."""
    where = _Group(parser, "Where requests go")
    where.add(
        "--grpc-url",
        default="127.0.0.1:8001",
        env_var="LIFECYCLE_GRPC_URL",
        help="Triton's gRPC port, host:port, asked by users over `grpc`.",
    )
    where.add(
        "--http-url",
        default="127.0.0.1:8000",
        env_var="LIFECYCLE_HTTP_URL",
        help="Triton's HTTP port, host:port, asked by users over `generate_stream` and `generate`.",
    )
    where.add("--model", default="smollm2", help="The model to ask.")
    where.add(
        "--over",
        default="grpc,generate_stream,generate",
        help="The front ends, with weights if you like: `grpc:3,generate` sends three of four requests over gRPC. "
        "`generate` brings an answer in one piece: its first token comes with its last. `tritonclient` is gRPC without "
        "our client, so nothing is sent again.",
    )
    where.add("--request-timeout", type=float, default=60.0, help="Seconds a caller allows for an answer.")
    where.add(
        "--attempts",
        type=int,
        default=1,
        help="How often a caller sends a refused request in all. 1 shows every refusal; 3 is what our client does.",
    )

    what = _Group(parser, "What is asked (the same seed asks the same, however many workers there are)")
    what.add("--seed", type=int, default=0, help="Another seed, other words, lengths and moments.")
    what.add(
        "--prompt-tokens",
        default="64",
        help="Lengths of prompts: 64, uniform:16-256, or lognormal:MEDIAN,SIGMA such as lognormal:120,0.8, which is "
        "what real traffic looks like: mostly short, a few very long.",
    )
    what.add("--answer-tokens", default="64", help="Lengths of answers, in the same forms.")
    what.add(
        "--prefix-tokens",
        type=int,
        default=0,
        help="So many tokens at the beginning of all prompts are the same, as a system prompt is; with 0 no prefix "
        "cache can help.",
    )
    what.add(
        "--recording",
        default="",
        help="Take lengths and limits from what a recorder wrote (event_driven.recorder: a file, folder or glob) "
        "instead. Words are never recorded; prompts of the same length are made.",
    )

    when = _Group(parser, "When it is asked")
    when.add(
        "--arrival-rate",
        type=float,
        default=0.0,
        help="Requests per second that arrive whatever becomes of those before (open loop, as from many independent "
        "callers). 0: closed loop, each of -u users asks again when it has its answer, so a slow server is asked less; "
        "use it for capacity, and the open loop for waiting times.",
    )
    when.add(
        "--arrivals",
        default="poisson",
        choices=["poisson", "even", "recorded"],
        help="Spacing of arrivals: poisson (independent callers), even, or recorded (from --recording).",
    )
    when.add("--speed", type=float, default=1.0, help="2 plays recorded arrivals twice as fast.")
    when.add(
        "--shape",
        default="steady",
        help="How the load goes over --run-time, as multiples of -u or --arrival-rate: steady, steps:0.25,0.5,1, "
        "spike:4 (once, a tenth of the time), bursts:3 (2 s in every 10 s, the mean stays 1), soak (slowly up, then "
        "steady).",
    )
    when.add("--think", type=float, default=0.0, help="Seconds between an answer and a user's next request.")
    when.add(
        "--chaos",
        type=float,
        default=0.0,
        help="Share of users (of arrivals in an open loop) that cancel, read slowly, allow too little time or send "
        "rubbish; a quarter each. They have series of their own and count as failed only if they end otherwise than "
        "such a caller must.",
    )
    when.add(
        "--drain",
        type=float,
        default=30.0,
        help="Seconds at the end for what is under way. What is cut then is left out, long answers before short ones: "
        "allow as long as your longest answer takes.",
    )

    trust = _Group(parser, "Whether to believe it")
    trust.add(
        "--max-lag-ms",
        type=float,
        default=50.0,
        help="By how much this tool may itself be late (99th percentile). Beyond, it was the bottleneck: it reports "
        "nothing and exits with 3.",
    )
    trust.add(
        "--max-in-flight",
        type=int,
        default=2000,
        help="Requests of an open loop under way at once in each process; arrivals beyond are not sent, and then the "
        "run is refused as well.",
    )
    trust.add("--report", default="", help="File for the verdict and all series, in JSON.")
