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
        "KV usage incl. cached",
        "Blocks in use and free ones whose content can still be found. A freed block keeps its content until it is "
        "needed, so sooner or later this reaches 100 % in every run with prefix caching; it is no sign of pressure.",
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
        "Three peaks",
        "Peak running: most requests with a seat in the batch. Peak in flight: most sent and not finished at one "
        "instant, those that waited included. Peak concurrent (vLLM's row): most requests that touched the same "
        "second, so that short ones count together though they never met. Each is at least as large as the one before "
        "it, but vLLM's row leaves out requests that failed.",
    ),
    (
        "Busy",
        "Share of the time in which a step ran, however little was in it: one decoding request keeps an engine busy. "
        "How much of what it can do is used says rho.",
    ),
    (
        "Utilisation (rho)",
        "Offered request rate over the rate at which the system is full, as measured between ramp-up and drain of a "
        "short run of the same requests all at once. Above 1 no queue is bounded.",
    ),
    (
        "Request rate configured, offered",
        "Configured is what the client was told, as vllm bench serve prints it. Offered is measured: requests due a "
        "second, from the first to the last. In conversations every turn counts, so it is higher.",
    ),
    (
        "Stable, backlogged, overloaded, too short",
        "Stable: no lasting queue. Backlogged: a queue stood most of the time, rose in a peak or had to be drained, "
        "but did not grow without bound. Overloaded: more came than could be served, so latencies grow with the length "
        "of the run, and no objective on them counts as kept. Too short: the system was still filling up.",
    ),
    (
        "Measured, composed, uncalibrated",
        "What stands behind step times. Measured: a profile fitted to whole steps that were measured on this card with "
        "this model. Composed, not measured: a profile fitted to steps that were put together from tables of kernels, "
        "or carried over from another card or model. Uncalibrated: a formula over datasheet peaks, or a number that "
        "was given.",
    ),
)
