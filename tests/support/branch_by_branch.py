"""The log-probs of branches by one forward pass each, without padding."""

import numpy as np
import torch


def texts(trees):
    """Each prompt with one of its completions, and how long the completion is."""
    for tree in trees:
        for branch in tree.branches:
            tokens = np.concatenate([tree.prompt, branch]).astype(np.int64)
            yield torch.from_numpy(tokens)[None], len(branch)


def own_predictions(model, trees):
    """The last states and the logits that predict every completion token, and the tokens."""
    states, logits, targets = [], [], []
    for tokens, length in texts(trees):
        outputs = model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        predictors = slice(-length - 1, -1)
        states.append(outputs.hidden_states[-1][0, predictors])
        logits.append(outputs.logits[0, predictors])
        targets.append(tokens[0, -length:])
    return torch.cat(states), torch.cat(logits), torch.cat(targets)


def own_logps(model, trees):
    """Log p of every completion token."""
    _, logits, targets = own_predictions(model, trees)
    return torch.log_softmax(logits, -1).gather(1, targets[:, None]).squeeze(1)


def num_tokens(trees):
    """Completion tokens of all branches."""
    return sum(len(branch) for tree in trees for branch in tree.branches)


def slopes_of(count, seed=0):
    """The weight of each position in the loss."""
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def worst_parameter(model, expected):
    """The largest difference, as a share of the largest element of that parameter's gradient."""
    shares = []
    wanted = dict(expected.named_parameters())
    for name, found in model.named_parameters():
        gap = (found.grad.double() - wanted[name].grad.double()).abs().max()
        largest = wanted[name].grad.abs().max()
        # Some biases make no difference, so that their gradient is nothing but rounding.
        shares.append(float(gap / largest) if largest > 1e-10 else float(gap))
    return max(shares)
