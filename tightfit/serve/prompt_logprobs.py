"""Log probabilities of a prompt's own tokens, for clients that score texts instead of having them continued.

One forward pass through the decoder, as for embeddings; logits of a few positions at a time, never all of them.
"""

from collections.abc import Sequence

import torch

from tightfit.errors import UserError
from tightfit.kernels.loss.cross_entropy import softcapped
from tightfit.models.embedding import last_states
from tightfit.serve.engine import Engine
from tightfit.serve.requests.request import TokenLogprob

ROWS = 64


@torch.inference_mode()
def prompt_logprobs(tokens: Sequence[int], top: int, engine: Engine) -> list[TokenLogprob]:
    """The log probability of each token after the first, with the `top` likeliest tokens at its position."""
    if engine.spread:
        raise UserError(
            "echo with logprobs needs a model that is whole on one rank; serve it without --tensor and --pipeline"
        )
    model, found = engine.model, []
    states, after = last_states(model, tokens)[:-1], torch.tensor(tokens[1:], device=model.embed.weight.device)
    for rows, chosen in zip(states.split(ROWS), after.split(ROWS), strict=True):
        logprobs = softcapped(model.head(rows), model.spec.logit_softcap).float().log_softmax(-1)
        values, likeliest = logprobs.topk(top)
        own = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
        for token, logprob, ids, row in zip(chosen.tolist(), own, likeliest.tolist(), values.tolist(), strict=True):
            found.append(TokenLogprob(token, logprob, tuple(zip(ids, row, strict=True))))
    return found
