import torch
from logitship import CustomLogitProcessor


class NoRepeats(CustomLogitProcessor):
    """Never writes the same few tokens in a row twice."""

    def __call__(self, logits, custom_param_list=None):
        for row, params in enumerate(custom_param_list):
            written, state = params["__req__"].output_ids, params["__req__"].state
            before = params["size"] - 1  # so many tokens decide what is forbidden next
            followed_by = state.setdefault("followed_by", {})
            for place in range(max(before, state.get("read", 0)), len(written)):
                context = tuple(written[place - before : place])
                followed_by.setdefault(context, []).append(written[place])
            state["read"] = len(written)
            if len(written) >= before:
                context = tuple(written[len(written) - before :])
                logits[row, followed_by.get(context, [])] = -torch.inf
        return logits
