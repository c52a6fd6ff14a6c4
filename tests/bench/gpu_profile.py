"""The time of a profiled step by kind of kernel: products, attention, the output head, the rest."""

import re
from collections import Counter, defaultdict

# The head's own operations are known by the function that calls them, forward and backward.
HEAD = re.compile("FusedLogps")
ATTENTION = re.compile("attention|attn|flash|fmha|triton_tem|flex|softmax", re.IGNORECASE)
PRODUCT = re.compile(r"gemm|cutlass|nvjet|cublas|wgmma|matmul|::b?mm\b|::addmm|::baddbmm|triton_mm")
KINDS = {
    "products": "matrix products of the layers",
    "attention": "attention",
    "head": "the output head, forward and backward",
    "between": "what lies between products",
}


def by_kind(events):
    """Seconds of each kind of kernel, how many ran, and the longest by name.

    On a GPU a kernel's time counts, under the operations that launched it; on a CPU each
    operation's own time. Nothing counts twice.
    """
    seconds, counts, longest = Counter(), Counter(), Counter()
    for name, callers, micros in kernels_of(events):
        kind = kind_of(name, callers)
        seconds[kind] += micros / 1e6
        counts[kind] += 1
        longest[name[:80]] += micros / 1e6
    return {
        "busy": sum(seconds.values()),
        "kinds": {kind: {"seconds": seconds[kind], "kernels": counts[kind]} for kind in KINDS},
        "longest": dict(longest.most_common(12)),
    }


def kind_of(name, callers):
    if any(map(HEAD.search, callers)):
        return "head"
    if ATTENTION.search(name) or any(map(ATTENTION.search, callers)):
        return "attention"
    return "products" if PRODUCT.search(name) else "between"


def kernels_of(events):
    """The name of each kernel, the names of those that called it, and its microseconds."""
    on_host = [one for one in events if one.device_type.name == "CPU"]
    on_gpu = [one for one in events if one.device_type.name != "CPU"]
    if not on_gpu:
        for one in on_host:
            yield one.name, callers_of(one), one.self_cpu_time_total
        return
    # An operation tells of its kernels by name and time; a kernel tells of no operation.
    launched = defaultdict(list)
    for one in on_host:
        for kernel in one.kernels:
            launched[kernel.name, kernel.duration].append(one)
    for one in on_gpu:
        if not one.is_user_annotation:
            micros = one.time_range.elapsed_us()
            known = launched[one.name, micros]
            yield one.name, callers_of(known.pop() if known else None), micros


def callers_of(event):
    """The names of an operation and of those that it is a part of."""
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    return names
