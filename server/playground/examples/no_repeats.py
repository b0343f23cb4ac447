import torch
from logitship import CustomLogitProcessor


class NoRepeats(CustomLogitProcessor):
    """Forbids repeating a sequence of `size` tokens."""

    def __call__(self, logits, custom_param_list=None):
        for row, params in enumerate(custom_param_list):
            written, state = params["__req__"].output_ids, params["__req__"].state
            before = params["size"] - 1  # length of the context that a token must not follow again
            followed_by = state.setdefault("followed_by", {})
            for i in range(max(before, state.get("read", 0)), len(written)):
                context = tuple(written[i - before : i])
                followed_by.setdefault(context, []).append(written[i])
            state["read"] = len(written)
            if len(written) >= before:
                context = tuple(written[len(written) - before :])
                logits[row, followed_by.get(context, [])] = -torch.inf
        return logits
