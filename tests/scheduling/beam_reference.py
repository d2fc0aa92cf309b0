"""A beam search written down from its definition, over whole sequences and the whole vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_cluster.protocol.messages import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_cluster.protocol.sampling_params import SamplingParams

NOTHING = -1e9


def best_answers(
    sampling: SamplingParams, stop_ids: frozenset[int], logprobs: Callable[[Sequence[int]], Sequence[float]]
) -> list[tuple[list[int], FinishReason]]:
    """The n best answers. `logprobs`: of each token after an output.

    As in transformers, with lists in the place of tensors: `_update_finished_beams`, `_check_early_stop_heuristic` and
    `_beam_search_has_unfinished_sequences`.
    """
    params, most = sampling.beams, sampling.max_tokens
    assert params is not None
    width, penalty = params.width, params.length_penalty
    running: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, most + 1):
        every = [
            (score + logprob, (*tokens, token))
            for score, tokens in running
            for token, logprob in enumerate(logprobs(tokens))
        ]
        every.sort(key=lambda one: -one[0])
        every = every[: max(2, 1 + len(stop_ids)) * width]
        ends = [length == most or tokens[-1] in stop_ids for _, tokens in every]
        new = [
            (score / length**penalty, tokens) for (score, tokens), end in zip(every[:width], ends, strict=False) if end
        ]
        finished = sorted([*finished, *new], key=lambda one: -one[0])[:width]
        running = [one for one, end in zip(every, ends, strict=True) if not end][:width]
        is_full = len(finished) == width
        if not running or (is_full and params.early_stopping is True):
            break
        longest = most if params.early_stopping == "never" and penalty > 0 else length
        worst = finished[-1][0] if is_full else NOTHING
        if not running[0][0] / longest**penalty > worst:
            break
    return [
        (list(tokens), FinishReason.STOP if tokens[-1] in stop_ids else FinishReason.LENGTH)
        for _, tokens in finished[: sampling.n]
    ]
