"""Words of the field as reports use them, and the definitions that the numbers follow."""

from __future__ import annotations

GLOSSARY: tuple[tuple[str, str], ...] = (
    ("TTFT", "Time to first token: from sending a request until its first output token. Includes waiting and prefill."),
    (
        "ITL",
        "Inter-token latency: the gap between two successive tokens of a request. All gaps of all finished requests "
        "are pooled, so long answers weigh more.",
    ),
    (
        "TPOT",
        "Time per output token: (E2EL - TTFT) / (output tokens - 1), one value a request; requests with a single "
        "output token have none. Its mean differs from that of ITL because every request weighs the same.",
    ),
    ("E2EL", "End-to-end latency: from sending a request until its last token."),
    ("Queue time", "From the arrival in the engine until the first step that computes any of the request."),
    (
        "Client queue time",
        "How long a client-side limit on requests in flight held a request before it was sent. As in vllm bench "
        "serve, TTFT and E2EL leave it out.",
    ),
    ("P99", "99 % of the values are at most this large (linear interpolation between ranks, as numpy does it)."),
    ("Goodput", "Requests per second that kept all given limits on TTFT, TPOT and E2EL."),
    (
        "Step",
        "One forward pass of the model over a batch: one token for each decoding request, and chunks of prompts. "
        "Every request in it waits for its end.",
    ),
    ("Prefill, decode", "Prefill computes the prompt, several tokens at once; decode makes one token a step."),
    ("Token budget", "max_num_batched_tokens: how many tokens one step may compute at most."),
    ("Seats", "max_num_seqs: how many requests may run at the same time."),
    (
        "KV usage",
        "Share of the KV cache's blocks that requests hold (active). Cached blocks are free, but what they hold can "
        "still be found by a prompt that begins alike.",
    ),
    (
        "Preemption",
        "When a running request needs a block and none is free, another one loses all of its blocks, goes back to the "
        "queue and is computed again from the start.",
    ),
    ("Recomputed tokens", "Work that preemptions threw away and that had to be done again."),
    (
        "Prefix cache hit rate",
        "Share of prompt tokens found in the KV cache when a request is first admitted; with resumed, lookups after "
        "preemptions count too.",
    ),
    ("In flight", "Requests sent and not yet finished. By Little's law its mean is throughput times mean E2EL."),
    (
        "Utilisation (rho)",
        "Offered request rate over the rate at which the system is full. Above 1 no queue is bounded.",
    ),
    (
        "Stable, backlogged, overloaded",
        "Stable: no lasting queue. Backlogged: a queue stood most of the time or had to be drained, but did not grow "
        "without bound. Overloaded: more came than could be served, so latencies grow with the length of the run.",
    ),
    ("Uncalibrated", "Step times come from a formula, not from measurements on this hardware."),
)
