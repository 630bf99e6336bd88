"""Microseconds of a stack of layers: captured in one CUDA graph, replayed back to back."""
# pyright: reportMissingImports=false

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

_LEAST_SECONDS = 0.05  # a sample's length, as in jmx.perf.bench


def replay(calls: Sequence[Callable[[], torch.Tensor]], repeats: int) -> tuple[float, float, torch.Tensor]:
    """Median microseconds a call, (slowest - fastest) / median, and the first call's result in the last replay.

    All calls are in one graph, one after the other. Each of the `repeats` samples is the mean of so many replays that
    it lasts 50 ms; two rounds before them warm up.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compilation and allocation of a first call must not be captured
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = [call() for call in calls]
    graph.replay()
    torch.cuda.synchronize()

    replays, samples = 1, []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) / replays)
        replays = max(1, min(1000, math.ceil(_LEAST_SECONDS / samples[-1])))
    samples = samples[2:]

    results[0].fill_(math.nan)  # so that the checked result comes from the graph
    graph.replay()
    torch.cuda.synchronize()
    median = statistics.median(samples)
    return 1e6 * median / len(calls), (max(samples) - min(samples)) / median, results[0]
