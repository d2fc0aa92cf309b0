"""What may follow the tokens of a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt


class DraftOffer(NamedTuple):
    """Tokens that the next draws may give, at least one."""

    tokens: Sequence[int]
    # [i]: the chance that `tokens[: i + 1]` are drawn, after what running steps are expected to draw. It never rises
    chances: npt.NDArray[np.float32]
