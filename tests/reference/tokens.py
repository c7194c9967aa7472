"""The documented token hash of the recorded cases, for the reference scheduler."""


def splitmix64(x):
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    z = x
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def tok(seed, i, vocab=32000):
    """Token i of the stream ``seed``; a callable seed knows its own tokens."""
    if callable(seed):
        return seed(i)
    return 3 + splitmix64(((seed & 0xFFFFFFFF) << 32) ^ (i & 0xFFFFFFFF)) % (vocab - 3)


def unit(seed, i):
    return (splitmix64(((seed & 0xFFFFFFFF) << 32) ^ (i & 0xFFFFFFFF) ^ (0xA5 << 56)) >> 11) / float(1 << 53)


def expand_prompt(r):
    if "prompt_token_ids" in r:
        return list(r["prompt_token_ids"])
    n, k = r["prompt_len"], r.get("prefix_len", 0)
    k = min(k, n)
    g = r.get("prefix_group", 0)
    out = [tok(1_000_000 + g, i) for i in range(k)]
    out += [tok(r.get("seed", 0), i) for i in range(k, n)]
    return out
